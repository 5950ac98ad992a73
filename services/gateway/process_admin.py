"""One admin port for a gateway of several processes.

Each process serves its admin routes at a Unix socket. The parent asks all of them and sums up.
Tests: tests/e2e/test_gateway_processes.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import prometheus_client
from aiohttp import web

from kvmesh.console.page import REQUEST_PATH, SHARE_PATH
from kvmesh.console.rows import Json
from kvmesh.console.share import Share, added, share_from_json
from kvmesh.core.named_values import listed
from kvmesh.runtime.admin import AdminPort, json_body
from kvmesh.runtime.admin_routes import add_service_routes, metrics_answer, set_log_level
from kvmesh.runtime.app import mesh_access
from kvmesh.telemetry.exposition import shared_registry
from services.gateway.config import GatewayConfig
from services.gateway.console import ConsoleSources, add_console

ANSWER_S = 2.0
"""Seconds that a process has to answer; otherwise the sum omits it."""


def admin_socket(folder: Path, number: int) -> Path:
    """The Unix socket at which a process serves its admin routes."""
    return folder / f"admin-{number}.sock"


class ProcessSockets:
    """Asks the processes of a gateway.

    Args:
        sessions: one per process, connected to its socket.
    """

    def __init__(self, sessions: Sequence[aiohttp.ClientSession]) -> None:
        self._sessions = sessions

    @classmethod
    async def open(cls, folder: Path, count: int, stack: AsyncExitStack) -> ProcessSockets:
        """Opens the sessions of `count` processes, which need not have started yet."""
        timeout = aiohttp.ClientTimeout(ANSWER_S)
        sessions = [
            aiohttp.ClientSession(
                "http://process",
                connector=aiohttp.UnixConnector(str(admin_socket(folder, number))),
                timeout=timeout,
            )
            for number in range(count)
        ]
        for session in sessions:
            await stack.enter_async_context(session)
        return cls(sessions)

    async def get(self, path: str) -> dict[int, Any]:
        """Sends a GET to all processes; returns the successful answers by process number."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Json) -> dict[int, Any]:
        """Sends a POST to all processes; returns the successful answers by process number."""
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: Json | None) -> dict[int, Any]:
        async def one(session: aiohttp.ClientSession) -> Any:
            try:
                async with session.request(method, path, json=body) as answer:
                    return await answer.json() if answer.ok else None
            except (aiohttp.ClientError, OSError, TimeoutError):
                return None

        answers = await asyncio.gather(*map(one, self._sessions))
        return {number: answer for number, answer in enumerate(answers) if answer is not None}


class AllRequests:
    """Requests of all processes. It keeps the totals of ended processes.

    Args:
        pids: the processes that run now, by number.
    """

    def __init__(self, sockets: ProcessSockets, pids: Callable[[], dict[int, int]]) -> None:
        self._sockets = sockets
        self._pids = pids
        self._known: dict[int, tuple[int, Share]] = {}
        self._past = Share()

    async def share(self, *, with_rows: bool) -> Share:
        """See `Requests.share`. The last second of an ended process is not counted."""
        pids = self._pids()
        answers = await self._sockets.get(SHARE_PATH + ("?rows=1" if with_rows else ""))
        now = self._pids()
        for number, (pid, known) in tuple(self._known.items()):
            if now.get(number) != pid:
                del self._known[number]
                self._past = added((self._past, known.past()))
        shares: list[Share] = []
        for number, answer in answers.items():
            if number in now and pids.get(number) == now[number]:  # else it was replaced meanwhile
                shares.append(share_from_json(answer))
                self._known[number] = (now[number], shares[-1])
        late = [share.past() for number, (_, share) in self._known.items() if number not in answers]
        return added((self._past, *late, *shares))

    async def find(self, name: str) -> Json | None:
        """See `Requests.find`."""
        answers = await self._sockets.get(REQUEST_PATH + quote(name, safe=""))
        return max(answers.values(), key=lambda found: found["at"], default=None)


def process_admin(
    config: GatewayConfig,
    sockets: ProcessSockets,
    requests: AllRequests,
    folder: Path,
    stop: Callable[[], None],
) -> tuple[AdminPort, dict[str, Coroutine[Any, Any, None]]]:
    """The admin port of the whole gateway, and the background tasks that it needs.

    Args:
        folder: the folder in which the processes share their metrics.
        stop: starts draining all processes.

    Raises:
        ConfigError: its token cannot be used, or one is missing.
    """
    admin = AdminPort(config.server.admin)
    registry = shared_registry(folder)

    async def metrics(_request: web.Request) -> web.StreamResponse:
        text = await asyncio.to_thread(prometheus_client.generate_latest, registry)
        return metrics_answer(text)

    async def tasks(_request: web.Request) -> web.StreamResponse:
        answers = await sockets.get("/debug/tasks")
        return web.json_response(
            [{"process": number, **task} for number, found in answers.items() for task in found]
        )

    async def log_level(request: web.Request) -> web.StreamResponse:
        body = await json_body(request)
        answer = set_log_level(body)
        await sockets.post("/admin/log-level", body)
        return answer

    add_service_routes(admin, "gateway", config, stop)
    admin.route("GET", "/metrics", metrics)
    admin.route("GET", "/debug/tasks", tasks)
    admin.route("POST", "/admin/log-level", log_level)
    targets = listed(config.scheduler.targets)
    access = mesh_access(config.server)
    names = [each.name for each in config.model.every]
    return admin, add_console(admin, ConsoleSources(names, targets, access, requests))
