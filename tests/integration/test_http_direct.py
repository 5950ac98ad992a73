"""Plain requests past the HTTP server: the same answers, and where they stop being plain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from services.gateway.config import AccessConfig, HttpConfig
from services.gateway.fronts import http_direct
from services.gateway.fronts.calls import Calls
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack

WHOLE: dict[str, Any] = {"model": MODEL, "prompt": "one", "max_tokens": 4, "seed": 1}
STREAM = {**WHOLE, "max_tokens": 60, "stream": True}
BAD = {**WHOLE, "temperature": 9}


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    http = HttpConfig(port=0, max_body_bytes=1 << 16, idle_timeout_s=30)
    async with gateway_stack(tmp_path, says="no token is lost " * 8, http=http) as stack:
        yield stack


@pytest.fixture
def num_handed_over(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was in the buffer of connections that went over to aiohttp."""
    seen: list[bytes] = []
    hand_over = http_direct._Connection._hand_over

    def noted(self: http_direct._Connection) -> None:
        seen.append(bytes(self._buffer))
        hand_over(self)

    monkeypatch.setattr(http_direct._Connection, "_hand_over", noted)
    return seen


def request(body: Any, *more: str, path: str = "/v1/completions") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = ["Host: x", "x-request-id: same", f"Content-Length: {len(content)}", *more]
    return (
        f"POST {path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + content
    )


@contextlib.asynccontextmanager
async def connected(
    stack: Stack,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = stack.gateway.http_port
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, str], bytes]:
    """Status line, headers by lower-case name, and the body without what differs by call."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = await reader.readuntil(b"\r\n0\r\n\r\n")
        body = re.sub(rb"(^|\r\n)[0-9a-f]+\r\n(?=data|$)", b"", body.removesuffix(b"0\r\n\r\n"))
        body = body.removesuffix(b"\r\n")
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return status.encode(), headers, re.sub(rb'"created":\d+', b"", body)


@pytest.mark.parametrize("body", [WHOLE, STREAM, BAD, b"{", {**STREAM, "n": 2}])
async def test_answers_are_those_of_the_server(
    stack: Stack, num_handed_over: list[bytes], body: Any
) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(request(body))
        direct = await answer(reader)
        assert num_handed_over == []
        writer.write(request(body, "X-Twice: 1", "X-Twice: 2"))
        served = await answer(reader)
        assert len(num_handed_over) == 1
    for _, headers, _ in (direct, served):
        assert headers.pop("date")
    if body != {**STREAM, "n": 2}:  # two choices come as they come
        assert direct == served
    assert direct[:2] == served[:2]
    await stack.idle()


async def test_refusals_have_their_headers(tmp_path: Path) -> None:
    access = AccessConfig(api_keys="right")
    async with (
        gateway_stack(tmp_path, access=access) as stack,
        connected(stack) as (reader, writer),
    ):
        writer.write(request(WHOLE, "Authorization: Bearer wrong"))
        status, headers, _ = await answer(reader)
        assert (status, headers["www-authenticate"]) == (b"HTTP/1.1 401 Unauthorized", "Bearer")
        stack.mesh.workers["p1"].does.reject_offers = -1
        writer.write(request(WHOLE, "Authorization: Bearer right", "x-slo-ttft-ms: 500"))
        status, headers, body = await answer(reader)
        assert status == b"HTTP/1.1 503 Service Unavailable"
        assert headers["x-kvmesh-refusal"] == "prefill-busy"
        assert int(headers["retry-after"]) >= 1
        assert json.loads(body)["error"]["type"] == "overloaded_error"
        await stack.idle()


async def test_requests_in_pieces_and_one_behind_the_other(
    stack: Stack, num_handed_over: list[bytes]
) -> None:
    async with connected(stack) as (reader, writer):
        raw = request(WHOLE)
        end = raw.index(b"\r\n\r\n") + 4
        for at in (end, end + 1, len(raw) - 1):  # head and body in writes of their own
            writer.write(raw[:at])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(raw[at:])
            assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
        writer.write(request(STREAM) + request(WHOLE) + request(BAD))
        statuses = [(await answer(reader))[0] for _ in range(3)]
        assert statuses == [b"HTTP/1.1 200 OK"] * 2 + [b"HTTP/1.1 400 Bad Request"]
        assert num_handed_over == []
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
        writer.write(raw)
        assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
        assert len(num_handed_over) == 1


async def test_a_flood_behind_a_request_waits(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, num_handed_over: list[bytes]
) -> None:
    monkeypatch.setattr(http_direct, "MAX_DIRECT_BYTES", 2000)
    async with connected(stack) as (reader, writer):
        writer.write(request(STREAM) + request(WHOLE) * 40)
        for _ in range(41):
            assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
        assert num_handed_over == []
    await stack.idle()


async def test_a_slow_or_long_body_goes_over(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, num_handed_over: list[bytes]
) -> None:
    monkeypatch.setattr(http_direct, "BODY_PATIENCE_S", 0.05)
    async with connected(stack) as (reader, writer):
        raw = request(WHOLE)
        writer.write(raw[:-1])
        await stack.mesh.until(lambda: bool(num_handed_over))
        writer.write(raw[-1:])
        assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
    async with connected(stack) as (reader, writer):
        writer.write(request(b" " * (1 << 16) + b"{}"))
        phrase = HTTPStatus.REQUEST_ENTITY_TOO_LARGE.phrase  # another one since Python 3.13
        assert (await answer(reader))[0] == b"HTTP/1.1 413 " + phrase.encode()
    assert len(num_handed_over) == 2


async def test_a_client_that_leaves_cancels_the_work(stack: Stack) -> None:
    stack.mesh.go = asyncio.Event()
    async with connected(stack) as (_, writer):
        writer.write(request(WHOLE))
        await stack.mesh.until(lambda: stack.gateway.admission.num_open == 1)
    await stack.idle()


async def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    http = HttpConfig(port=0, idle_timeout_s=0.1)
    async with gateway_stack(tmp_path, http=http) as stack, connected(stack) as (reader, writer):
        writer.write(request(WHOLE))
        assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
        assert await reader.read() == b""


@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_an_error_of_ours_is_told_and_logged(
    stack: Stack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    body: dict[str, Any],
) -> None:
    async def broken(self: Calls, *_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Calls, "answer", broken)
    said = []
    for headers in ((), ("X-Twice: 1", "X-Twice: 2")):  # the second one is for the server
        async with connected(stack) as (reader, writer):
            writer.write(request(body, *headers))
            status, _, content = await answer(reader)
            assert status == b"HTTP/1.1 500 Internal Server Error"
            assert await reader.read() == b""
            said.append(content)
        assert "ZeroDivisionError" in caplog.text
        caplog.clear()
    assert said[0] == said[1]


async def test_a_gateway_that_ends_closes_connections(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)
        writer.write(request(WHOLE))
        assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
    assert await reader.read() == b""
    writer.close()


async def test_a_client_that_does_not_read_holds_up_its_stream_alone(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.says("no token is lost " * 200)
    long = {**STREAM, "max_tokens": 400, "logprobs": 20}  # no short way, and long events
    async with connected(stack) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request(long) * 3)
        async with connected(stack) as (other, to_other):
            to_other.write(request(WHOLE))
            assert (await answer(other))[0] == b"HTTP/1.1 200 OK"
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(3):
            assert (await answer(reader))[2].endswith(b"data: [DONE]\n\n")
    await stack.idle()
