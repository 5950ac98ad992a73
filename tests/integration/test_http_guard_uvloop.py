"""The guard on the loop that services run on, whose transports are of a type of their own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import uvloop

from kvmesh.rpc.listening_port import ListeningPort
from kvmesh.runtime.http_connection import HttpProtocol
from services.gateway.config import HttpConfig
from services.gateway.fronts.http_guard import ConnectionGuard
from services.gateway.metrics import GatewayMetrics


def test_a_slow_and_a_surplus_client_are_cut() -> None:
    errors: list[dict[str, Any]] = []

    async def run() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        metrics = GatewayMetrics()
        config = HttpConfig(max_connections=1, header_timeout_s=0.2)
        guard = ConnectionGuard(config, metrics)
        server = ListeningPort(None, 1.0, guard.wrap(HttpProtocol), guard.turned_away)
        port = await server.start("127.0.0.1", 0)
        ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in ends:
            with contextlib.suppress(ConnectionResetError):  # cut is cut
                assert await reader.read() == b""
            writer.close()
        server.close()
        cut = "kvmesh_gateway_connections_cut_total"
        return metrics.value(cut, reason="gave_way"), metrics.value(cut, reason="slow_headers")

    assert uvloop.run(run()) == (1.0, 1.0)
    assert errors == []
