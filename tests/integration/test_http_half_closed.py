"""Clients that send FIN after their request: some still read, some have gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.runtime.half_closed import INTERIM
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack

BODY: dict[str, Any] = {"model": MODEL, "prompt": "one", "max_tokens": 30, "ignore_eos": True}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "one", "max_output_tokens": 30}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, says="no token is lost " * 8) as stack:
        yield stack


def request(path: str, body: dict[str, Any], version: str = "1.1", *more: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(content)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@contextlib.asynccontextmanager
async def half_closed(
    stack: Stack, sent: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection whose client has sent all that it will send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
    writer.write(sent)
    writer.write_eof()
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        ("/v1/completions", BODY, ()),
        ("/v1/completions", BODY, ("Connection: close",)),  # read by aiohttp
        ("/v1/responses", RESPONSE, ()),
    ],
)
async def test_its_answer_comes_whole_and_ends_the_connection(
    stack: Stack, path: str, body: dict[str, Any], more: tuple[str, ...], stream: bool
) -> None:
    stack.mesh.go.clear()
    sent = request(path, {**body, "stream": stream}, "1.1", *more)
    async with half_closed(stack, sent) as (reader, _):
        assert await reader.readexactly(len(INTERIM)) == INTERIM, "looks whether it has gone"
        await stack.mesh.until(lambda: bool(stack.mesh.workers["d1"].running))
        stack.mesh.go.set()
        answer = (await reader.read()).replace(INTERIM, b"")
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    if not stream:
        json.loads(content)
    else:
        assert content.endswith(b"\r\n0\r\n\r\n")
        assert b"[DONE]" in content or b"event: response.incomplete" in content
    assert not stack.mesh.workers["d1"].cancels
    await stack.idle()


@pytest.mark.parametrize("more", [(), ("Connection: close",)])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_work_of_one_that_has_gone_is_cancelled(
    stack: Stack, more: tuple[str, ...], stream: bool
) -> None:
    stack.mesh.go.clear()  # no token comes that would tell
    sent = request("/v1/completions", {**BODY, "stream": stream}, "1.1", *more)
    worker = stack.mesh.workers["d1"]
    async with half_closed(stack, sent):
        await stack.mesh.until(lambda: bool(worker.running))
    await stack.idle()
    assert worker.cancels == worker.reserves


async def test_a_stream_that_has_begun_ends_when_its_client_has_gone(stack: Stack) -> None:
    worker = stack.mesh.workers["d1"]
    worker.does.stall_decode_after = 3
    async with half_closed(stack, request("/v1/completions", {**BODY, "stream": True})) as (
        reader,
        _,
    ):
        await reader.readuntil(b"data: ")
    await stack.idle()
    assert worker.cancels == worker.reserves


async def test_requests_behind_one_another_are_all_answered(stack: Stack) -> None:
    two = request("/v1/completions", BODY) * 2
    async with half_closed(stack, two) as (reader, _):
        assert (await reader.read()).count(b"HTTP/1.1 200 ") == 2
    await stack.idle()


@pytest.mark.parametrize("cut", [10, 60, -5])
async def test_half_a_request_ends_the_connection_at_once(stack: Stack, cut: int) -> None:
    async with half_closed(stack, request("/v1/completions", BODY)[:cut]) as (reader, _):
        assert await reader.read() == b""
    await stack.idle()


async def test_a_client_of_http_1_0_gets_no_interim_answer(stack: Stack) -> None:
    async with half_closed(stack, request("/v1/completions", BODY, "1.0")) as (reader, _):
        assert INTERIM not in await reader.read()
    await stack.idle()
