"""Every family by HTTP, through gateway, scheduler and two workers: tokens are transformers'."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from prometheus_client import CollectorRegistry

from kvmesh.engine.families import FAMILIES
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker_building import build_worker
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from services.gateway.config import GatewayConfig, HttpConfig, ModelConfig, SchedulerTargets
from services.gateway.service import Gateway, start_gateway
from services.scheduler.config import PlanningConfig, SchedulerConfig
from services.scheduler.service import start_scheduler
from tests.integration.kinds import model_of
from tests.unit.gateway.tiny_model import make_tokenizer
from tests.waiting import until

NEW_TOKENS = 8
PROMPT = [(7 * position) % 300 for position in range(40)]
SERVER = ServerConfig(port=0)


def write_model(kind: str, folder: Path) -> list[int]:
    """Writes a folder as transformers saves it; returns what it makes of the prompt."""
    model = model_of(kind)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    ids = torch.tensor([PROMPT])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in out[0]][-NEW_TOKENS:]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[str]:
    """URL of a mesh in this process that serves a folder."""
    async with AsyncExitStack() as stack:

        async def scheduler(config: SchedulerConfig, context: ServiceContext) -> None:
            await start_scheduler(config, context)

        async def worker(config: WorkerConfig, context: ServiceContext) -> None:
            await build_worker(config, context, WorkerMetrics(CollectorRegistry()))

        gateways: list[Gateway] = []

        async def gateway(config: GatewayConfig, context: ServiceContext) -> None:
            gateways.append(await start_gateway(config, context))

        roles = SchedulerConfig(server=SERVER, planning=PlanningConfig(roles="off"))
        context = await stack.enter_async_context(serving("scheduler", roles, scheduler))
        target = f"127.0.0.1:{context.port}"
        for role in ("prefill", "decode"):
            section = WorkerSection(
                id=role, role=role, scheduler_targets=target, kvmanager_target=""
            )
            engine = EngineSection(model=str(folder), model_name="tiny", num_blocks=64)
            config = WorkerConfig(server=SERVER, worker=section, engine=engine)
            await stack.enter_async_context(serving("worker", config, worker))
        front = GatewayConfig(
            server=SERVER,
            http=HttpConfig(port=0),
            model=ModelConfig(path=str(folder), served_name="tiny"),
            scheduler=SchedulerTargets(targets=target, route_timeout_s=10.0),
        )
        await stack.enter_async_context(serving("gateway", front, gateway))
        await until(lambda: gateways[0].sessions.num_connected == 2, "the gateway is connected")
        yield f"http://127.0.0.1:{gateways[0].http_port}"


@pytest.mark.parametrize("kind", sorted(FAMILIES))
async def test_tokens_by_http_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    expected = write_model(kind, tmp_path)
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with (
        served(tmp_path) as url,
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        answer = await response.json()
    assert response.status == 200, answer
    assert answer["choices"][0]["token_ids"] == expected
