"""A request counts from when it came to the machine, on the loop that services run on."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import CHAT, Stack, gateway_stack

TTFT_MS = 400
LATE_S = 1.5 * TTFT_MS / 1000
ODD = ("X-Twice: 1", "X-Twice: 2")
"""Goes past the direct way, to aiohttp."""


def asked(stack: Stack, *lines: str, ttft_ms: int = 10_000) -> bytes:
    """A request as it goes over the wire."""
    body = json.dumps(CHAT).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        f"Host: 127.0.0.1:{stack.gateway.http_port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"X-SLO-TTFT-ms: {ttft_ms}",
        *lines,
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def hold_up(seconds: float) -> None:
    """The whole process does something else for so long."""
    threading.Event().wait(seconds)


async def told(client: socket.socket) -> bytes:
    """The beginning of an answer, which is all in one piece."""
    return await asyncio.get_running_loop().sock_recv(client, 1 << 16)


@pytest.mark.parametrize("lines", [(), ODD], ids=["direct", "served"])
def test_what_lay_unread_for_longer_than_its_limit_is_refused(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    async def run() -> None:
        async with gateway_stack(tmp_path) as stack:
            address = ("127.0.0.1", stack.gateway.http_port)
            with (
                socket.create_connection(address) as known,
                socket.create_connection(address) as new,
            ):
                known.setblocking(False)
                known.send(asked(stack, *lines))
                assert b" 200 " in (await told(known))[:20]
                await stack.idle()
                num_queries = len(stack.mesh.queries)
                known.send(asked(stack, *lines, ttft_ms=TTFT_MS))
                new.send(asked(stack, *lines, ttft_ms=TTFT_MS))
                new.setblocking(False)
                hold_up(LATE_S)
                for client in (known, new):
                    answer = await told(client)
                    assert b" 503 " in answer[:20]
                    assert b"x-kvmesh-refusal: gateway-busy" in answer
                assert len(stack.mesh.queries) == num_queries  # nobody was asked
                known.send(asked(stack, *lines))
                assert b" 200 " in (await told(known))[:20]
                await stack.idle()

    uvloop.run(run())


def test_its_time_to_first_token_has_the_wait_in_it(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def run() -> None:
        async with gateway_stack(tmp_path) as stack:
            address = ("127.0.0.1", stack.gateway.http_port)
            with socket.create_connection(address) as client:
                client.send(asked(stack))
                client.setblocking(False)
                hold_up(LATE_S)
                assert b" 200 " in (await told(client))[:20]
                await stack.idle()
            metrics = stack.gateway.metrics
            seen["ttft_s"] = metrics.value("vllm:time_to_first_token_seconds_sum", model_name=MODEL)

    uvloop.run(run())
    assert seen["ttft_s"] >= LATE_S
