"""How connections end while a gateway drains, and at the end of its drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack

BODY: dict[str, Any] = {"model": MODEL, "prompt": "one", "max_tokens": 30, "ignore_eos": True}


def request(body: dict[str, Any], path: str = "/v1/completions", *more: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(content)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@contextlib.asynccontextmanager
async def connected(
    stack: Stack,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_answers_of_a_draining_gateway_end_their_connections(
    tmp_path: Path, path: str
) -> None:
    async with gateway_stack(tmp_path) as stack, connected(stack) as (reader, writer):
        writer.write(request({**BODY, "model": "another"}, path))
        assert b"\r\nconnection: close" not in (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readuntil(b"}}")
        stack.mesh.go.clear()
        async with connected(stack) as (_, busy):
            busy.write(request(BODY))
            await stack.mesh.until(lambda: bool(stack.mesh.workers["d1"].running))
            drain = asyncio.create_task(stack.context.drain(30.0))
            await stack.mesh.until(lambda: stack.gateway.admission.draining)
            writer.write(request(BODY, path))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nconnection: close\r\n" in head.lower()
            assert b"draining" in await reader.read(), "and then the end"
            stack.mesh.go.set()
        await drain


@pytest.mark.parametrize("stream", [True, False])
async def test_what_still_runs_at_the_end_of_the_drain_is_refused_in_words(
    tmp_path: Path, stream: bool
) -> None:
    async with contextlib.AsyncExitStack() as clients:
        async with gateway_stack(tmp_path, says="no token is lost " * 8) as stack:
            stack.mesh.workers["d1"].does.stall_decode_after = 3
            reader, writer = await clients.enter_async_context(connected(stack))
            writer.write(request({**BODY, "stream": stream}))
            if stream:
                await reader.readuntil(b"data: ")
            await stack.mesh.until(lambda: bool(stack.mesh.workers["d1"].running))
        answer = await reader.read()
    if stream:
        assert answer.endswith(b"\r\n0\r\n\r\n"), "the body is complete"
        last = answer.split(b"data: ")[-1].partition(b"\r\n")[0]
        assert json.loads(last)["error"]["message"].startswith("this gateway stopped")
    else:
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"x-kvmesh-refusal: gateway-draining" in answer
