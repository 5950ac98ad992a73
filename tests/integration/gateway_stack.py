"""A real gateway in this process in front of a fake mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from kvmesh.core.types import Role
from kvmesh.runtime.app import ServiceContext, serving
from services.gateway.config import (
    GatewayConfig,
    HttpConfig,
    LimitsConfig,
    ModelConfig,
    SchedulerTargets,
)
from services.gateway.service import Gateway, start_gateway
from services.gateway.wire.worker_sessions import WorkerSession
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_fakes import FakeMesh, fake_mesh
from tests.unit.gateway.tiny_model import EOS, write_model

PAIR = {"p1": Role.PREFILL, "d1": Role.DECODE}
_Noted = TypeVar("_Noted")

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 200,
}
TWO_PAIRS = {"p1": Role.PREFILL, "p2": Role.PREFILL, "d1": Role.DECODE, "d2": Role.DECODE}


@dataclasses.dataclass
class Stack:
    mesh: FakeMesh
    gateway: Gateway
    context: ServiceContext
    client: AsyncOpenAI
    tokenizer: Tokenizer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.http_port}"

    def says(self, text: str) -> list[int]:
        """Sets what the model says from now on."""
        self.mesh.output = self.tokenizer.encode(text).ids
        return self.mesh.output

    async def idle(self) -> None:
        """Waits until nothing of any request is left anywhere."""
        gateway = self.gateway
        await self.mesh.until(
            lambda: (
                self.mesh.num_open == 0
                and gateway.sessions.num_open == 0
                and gateway.sessions.num_held == 0
                and gateway.admission.num_open == 0
                and gateway.lanes.num_waiting == 0
                and gateway.metrics.value("kvmesh_gateway_requests_open") == 0
            )
        )


@asynccontextmanager
async def gateway_stack(
    folder: Path,
    roles: dict[str, Role] | None = None,
    says: str = "one request, one handoff",
    **changes: Any,
) -> AsyncIterator[Stack]:
    """Starts everything and waits until the gateway is connected to the fleet.

    Args:
        changes: sections of the gateway's config; `limits` as a dict of fields; `template` is
            another chat template.
    """
    tokenizer = write_model(folder)
    if template := changes.pop("template", ""):
        (folder / "chat_template.jinja").write_text(template)
    limits = changes.pop("limits", {})
    model = changes.pop("model", ModelConfig(path=str(folder), served_name=MODEL))
    http = changes.pop("http", HttpConfig(port=0, max_body_bytes=1 << 16))
    async with fake_mesh(tokenizer.encode(says).ids, EOS, roles or PAIR) as mesh:
        config = GatewayConfig(
            http=http,
            model=model,
            scheduler=SchedulerTargets(targets=f"127.0.0.1:{mesh.port}", route_timeout_s=5.0),
            limits=LimitsConfig(**limits),
            **changes,
        )
        gateways: list[Gateway] = []

        async def build(config: GatewayConfig, context: ServiceContext) -> None:
            gateways.append(await start_gateway(config, context))

        async with serving("gateway", config, build) as context:
            (gateway,) = gateways
            url = f"http://127.0.0.1:{gateway.http_port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
                await mesh.until(lambda: gateway.sessions.num_connected == len(roles or PAIR))
                yield Stack(mesh, gateway, context, client, tokenizer)


def noted_asks(monkeypatch: pytest.MonkeyPatch, noted: Callable[[Any], _Noted]) -> list[_Noted]:
    """What is noted of each message that asks a worker for blocks, as it is sent."""
    seen: list[_Noted] = []
    reserve = WorkerSession.reserve

    def asks(self: WorkerSession, key: Any, message: Any, taker: Any) -> None:
        reserve(self, key, message, taker)
        seen.append(noted(message.reserve))

    monkeypatch.setattr(WorkerSession, "reserve", asks)
    return seen
