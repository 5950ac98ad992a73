"""The loader of the gateway bench: what it makes of answers, however they are cut into pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import cycle, repeat

import pytest

from benchmarks.gateway_load import Loader, Reply, request_bytes, stream_text
from benchmarks.gateway_systems import LOADER_ALONE
from benchmarks.gateway_targets import targets_of
from benchmarks.result import Row
from kvmesh.core.types import Endpoint

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
_SSE = _HEAD + b"Content-Type: text/event-stream; charset=utf-8\r\n\r\n"


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def _chunks(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


_OPENING = _event({"role": "assistant", "content": ""})
_STREAM = _chunks(_OPENING, _event({"content": "one"}), _event({"content": " two"}, "length"))
_DONE = _chunks(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@asynccontextmanager
async def _server(handler: Handler) -> AsyncIterator[Loader]:
    ended: list[asyncio.Event] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        mine = ended[-1]
        await handler(reader, writer)
        writer.close()
        mine.set()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    loader = Loader(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]))
    async with server:
        yield loader
        loader.close()
        for each in ended:
            await each.wait()


async def _ask(answer: bytes, piece: int, *, then_close: bool = False) -> Reply:
    """The reply to an answer that arrives in pieces of so many bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(2)
        for start in range(0, len(answer), piece):
            writer.write(answer[start : start + piece])
            await writer.drain()
            await asyncio.sleep(0)
        if not then_close:
            await reader.read()

    async with _server(handle) as loader:
        return await loader.one(request_bytes(loader.endpoint, {}), keep=True)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_a_stream_is_complete_at_its_last_chunk(piece: int) -> None:
    reply = await _ask(_SSE + _STREAM + _DONE, piece)
    assert reply.ok
    assert reply.sent_at < reply.first_at <= reply.ended_at
    assert stream_text(reply.body) == ("one two", True)
    assert reply.num_events == 4


async def test_the_role_alone_is_no_first_token() -> None:
    reply = await _ask(_SSE + _chunks(_OPENING) + _DONE, 10_000)
    assert reply.first_at == 0.0


@pytest.mark.parametrize("piece", [1, 10_000])
async def test_a_stream_that_is_cut_is_not_complete(piece: int) -> None:
    reply = await _ask(_SSE + _STREAM, piece, then_close=True)
    assert reply.status == 200
    assert not reply.ok


async def test_a_stream_that_ends_with_an_error_is_not_complete() -> None:
    error = b'data: {"error":{"message":"lost"}}\n\n'
    assert not (await _ask(_SSE + _STREAM + _chunks(error) + _DONE, 10_000)).ok


async def test_a_whole_answer_may_come_in_chunks() -> None:
    reply = await _ask(_HEAD + b"\r\n" + _chunks(b"{}") + b"0\r\n\r\n", 10_000)
    assert reply.ok
    assert reply.first_at


@pytest.mark.parametrize("piece", [1, 10_000])
async def test_a_refusal_keeps_its_status(piece: int) -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
    reply = await _ask(head, piece)
    assert (reply.status, reply.complete, reply.ok) == (503, True, False)


async def test_a_closed_loop_uses_its_connections_again() -> None:
    seen = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        while await reader.read(65536):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with _server(handle) as loader:
        replies = await loader.closed_loop(repeat(request_bytes(loader.endpoint, {})), 3, 0.05)
    assert len(replies) > seen == 3
    assert all(reply.ok for reply in replies)


async def test_an_open_loop_cuts_what_takes_too_long() -> None:
    async def handle(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with _server(handle) as loader:
        payload = request_bytes(loader.endpoint, {})
        replies = await loader.open_loop(repeat(payload), 500, 0.05, seed=1, longest_s=0.05)
    assert replies
    assert not any(reply.ok for reply in replies)


def test_targets_use_a_rival_of_the_same_run() -> None:
    what = "requests, 1 in flight"
    rows = [
        {"system": "kvmesh", "what": what, "per s": 500},
        {"system": "dynamo", "what": what, "per s": 250},
    ]
    found = {target.name: target for target in targets_of(rows)}
    assert found[f"kvmesh: {what} per s, x dynamo"].value == 2.0
    assert found["added first token p50 ms"].value is None


def test_what_is_added_is_less_what_the_loader_sees_alone() -> None:
    what = "first token, 50 streams/s"
    ours: Row = {"system": "kvmesh", "what": what, "p50 ms": 1.6, "p99 ms": 5.0}
    alone: Row = {"system": LOADER_ALONE, "what": what, "p50 ms": 0.3, "p99 ms": 1.2}
    found = {target.name: target for target in targets_of([alone, ours])}
    assert found["added first token p50 ms"].value == 1.3
    assert found["added first token p99 ms"].value == 3.8
    without = {target.name: target for target in targets_of([ours])}
    assert without["added first token p50 ms"].value is None, "not known without the row"


async def test_a_crowd_has_a_connection_for_each_request() -> None:
    asked: list[bytes] = []
    num_connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while head := await reader.read(1 << 16):
            asked.append(head)
            writer.write(_SSE + _STREAM + _DONE)

    async with _server(handle) as loader:
        payloads = [request_bytes(loader.endpoint, {"n": count}) for count in (1, 2)]
        replies = await loader.open_loop(
            cycle(payloads), 1000.0, 0.02, seed=1, longest_s=20.0, are_alone=True
        )
        assert all(reply.ok and reply.ttft_s > 0 for reply in replies)
        assert sorted(asked) == sorted(payloads[number % 2] for number in range(len(replies)))
        assert num_connections == len(replies) > 2
        again = await loader.one(payloads[0]), await loader.one(payloads[0])
        assert all(reply.ok for reply in again)
        assert num_connections == len(replies) + 1
