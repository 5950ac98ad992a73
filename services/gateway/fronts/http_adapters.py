"""vLLM's routes that load and remove LoRA adapters, where `http.adapter_changes` opens them.

The gateway passes the order on to a scheduler, which tells the workers.
Tests: tests/integration/test_gateway_adapters.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
from aiohttp import web

from kvmesh.core.errors import InvalidRequestError, LostError, ModelNotFoundError
from kvmesh.rpc.channels import MeshAccess, open_channel
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.v1.scheduler_service_pb2 import LoadAdapterRequest, RemoveAdapterRequest
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from services.gateway.api.adapters import LoadBody, UnloadBody
from services.gateway.api.schema import parse_body
from services.gateway.config import HttpConfig
from services.gateway.entrance import Entrance, model_of
from services.gateway.frontend import Frontend
from services.gateway.fronts.calls import parse_json
from services.gateway.fronts.http import authorization_of, read_body
from services.gateway.fronts.openapi import LOAD, UNLOAD

ANSWER_S = 90.0
"""Maximum seconds for a scheduler's answer; workers load the adapter meanwhile."""

SEEN_S = 5.0
"""Maximum seconds until this gateway's own view of the fleet shows the change."""

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

AnswerT = TypeVar("AnswerT")


class AdapterRoutes:
    """The two routes.

    Args:
        targets: `host:port` of the schedulers.
    """

    def __init__(
        self,
        entrance: Entrance,
        fleet: FleetWatch,
        targets: Sequence[str],
        access: MeshAccess,
        config: HttpConfig,
    ) -> None:
        self._changed = asyncio.Event()
        fleet.on_change(lambda _workers: self._changed.set())
        self._entrance = entrance
        self._targets = targets
        self._access = access
        self._config = config

    def routes(self) -> list[web.RouteDef]:
        """The routes, if the configuration opens them."""
        if not self._config.adapter_changes:
            return []
        return [web.post(LOAD, self.load), web.post(UNLOAD, self.unload)]

    async def load(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/load_lora_adapter; a model's name in `model` chooses one of several."""
        async with self._entrance.admit(authorization_of(request)):
            content = parse_json(await read_body(request, self._config.body_timeout_s))
            body = parse_body(LoadBody, content, {})
            name, frontend = body.lora_name, self._entrance.of(model_of(content))
            if any(name in each.served.model for each in self._entrance.frontends):
                raise InvalidRequestError(
                    f"The lora adapter '{name}' conflicts with a served base model.", "lora_name"
                )
            if name in frontend.served.adapters and not body.load_inplace:
                raise InvalidRequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    "lora_name",
                )
            model = frontend.served_name
            asked = LoadAdapterRequest(name=name, folder=body.lora_path, model=model)
            answer = await self._ask(
                lambda channel: SchedulerServiceStub(channel).LoadAdapter(asked, timeout=ANSWER_S)
            )
            ids = {each.adapter for each in answer.adapter.holders}
            await self._seen(lambda: frontend.served.adapters.get(name) in ids)
            return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/unload_lora_adapter."""
        async with self._entrance.admit(authorization_of(request)):
            content = parse_json(await read_body(request, self._config.body_timeout_s))
            name = parse_body(UnloadBody, content, {}).lora_name
            frontend = self._having(name)
            asked = RemoveAdapterRequest(name=name, model=frontend.served_name)
            await self._ask(
                lambda channel: SchedulerServiceStub(channel).RemoveAdapter(asked, timeout=ANSWER_S)
            )
            await self._seen(lambda: name not in frontend.served.adapters)
            return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    def _having(self, name: str) -> Frontend:
        for each in self._entrance.frontends:
            if name in each.served.adapters:
                return each
        message = f"The lora adapter '{name}' cannot be found."
        raise ModelNotFoundError(message, "lora_name", "model_not_found")

    async def _ask(self, call: Callable[[grpc.aio.Channel], Awaitable[AnswerT]]) -> AnswerT:
        """The answer of the first scheduler that can be reached.

        Raises:
            InvalidRequestError: it refuses, with its reason.
            LostError: none can be reached.
        """
        for target in self._targets:
            async with open_channel(target, self._access) as channel:
                try:
                    return await call(channel)
                except grpc.aio.AioRpcError as error:
                    if error.code() in _AWAY:
                        continue
                    raise InvalidRequestError(error.details() or error.code().name) from error
        raise LostError("no scheduler answered; the change may or may not happen")

    async def _seen(self, fact: Callable[[], bool]) -> None:
        """Waits until the fleet shows a change, so that the caller's next request finds it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEEN_S):
                while not fact():
                    self._changed.clear()
                    await self._changed.wait()
