"""The load of `benchmarks.gateway`: HTTP by hand on raw connections, so that it never is the limit.

Requests are bytes made before the run, answers are searched and not parsed: about 15 us of
processor time per request and 1 us per piece of a stream.
Tests: tests/unit/benchmarks/test_gateway_load.py.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvmesh.core.types import Endpoint

LONGEST_S = 20.0
"""A request that takes longer has failed."""

_HEAD_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_CHUNKED = re.compile(rb"(?i)\r\ntransfer-encoding: *chunked")
_EVENTS = re.compile(rb"(?i)\r\ncontent-type: *text/event-stream")
_EVENT = b"\ndata: "
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_TEXT = re.compile(rb'"content": ?"[^"]')
_CHUNK_SIZE = re.compile(rb"(?:^|\r\n)[0-9a-fA-F]+\r\n(?=data: |\n|$)")


@dataclass(slots=True)
class Reply:
    """What came back for one request; times in seconds on `time.perf_counter`.

    Attributes:
        status: 0 when the connection ended before the status line.
        first_at: first text of the model, or the whole body; 0.0 without.
        complete: the answer came to its proper end.
        num_events: of a stream.
        body: all of it when it was to be kept, else its last bytes.
    """

    sent_at: float
    status: int = 0
    first_at: float = 0.0
    ended_at: float = 0.0
    complete: bool = False
    num_events: int = 0
    body: bytes = b""

    @property
    def ok(self) -> bool:
        """A whole answer of the model."""
        return self.status == 200 and self.complete

    @property
    def ttft_s(self) -> float:
        """From the wish to send, before a connection is made, to the first text."""
        return self.first_at - self.sent_at

    @property
    def duration_s(self) -> float:
        """From the wish to send to the end."""
        return self.ended_at - self.sent_at


def request_bytes(endpoint: Endpoint, body: Mapping[str, Any], headers: str = "") -> bytes:
    """A chat completion request as it goes over the wire.

    Args:
        headers: further header lines, each with its end.
    """
    # As clients send it that are made with httpx: scripts are not escaped.
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    if body.get("stream"):
        # A client that may resume its streams, so that gateways that can do it journal them.
        headers = f"Accept: text/event-stream\r\n{headers}"
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {endpoint}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    )
    return head.encode() + content


def stream_text(raw: bytes) -> tuple[str, bool]:
    """The text of a kept stream, and whether it ended as it should: a reason and `[DONE]`."""
    text, finished, done = [], False, False
    for event in re.findall(rb"data: (.+)\n\n", _CHUNK_SIZE.sub(b"", raw)):
        if event.strip() == b"[DONE]":
            done = True
            continue
        for choice in json.loads(event).get("choices") or ():
            text.append((choice.get("delta") or {}).get("content") or "")
            finished |= choice.get("finish_reason") is not None
    return "".join(text), finished and done


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request on it at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._ended: asyncio.Future[Reply] | None = None
        self._keep = False
        self._head = b""
        self._left = -1  # bytes of a body with a length; -1: chunked
        self._events = False
        self._kept: list[bytes] = []
        self._tail = b""

    @property
    def usable(self) -> bool:
        """Whether it can take another request."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From the loop: the connection stands."""
        # Not a subclass under uvloop, but all that is needed of one.
        self._transport = cast("asyncio.Transport", transport)

    def send(
        self, payload: bytes, *, keep: bool = False, wanted_at: float | None = None
    ) -> asyncio.Future[Reply]:
        """Sends a request.

        Args:
            wanted_at: its times count from then; None: from now.
            keep: keep the whole body for `stream_text`.

        Returns:
            Its reply, when it has ended; never an exception.
        """
        assert self._transport is not None, "connected"
        self._head, self._left, self._tail, self._keep = b"", -1, b"", keep
        self._kept.clear()
        self._reply = Reply(time.perf_counter() if wanted_at is None else wanted_at)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(payload)
        return self._ended

    def data_received(self, data: bytes) -> None:
        """From the loop: a piece of the answer."""
        reply = self._reply
        if reply is None:
            return
        came_at = time.perf_counter()
        if not reply.status:
            self._head += data
            end = self._head.find(_HEAD_END)
            if end < 0:
                return
            data = self._read_head(reply, self._head[: end + 2], self._head[end + 4 :])
            if not data and self._left:
                return
        self._read_body(reply, data, came_at)

    def _read_head(self, reply: Reply, head: bytes, rest: bytes) -> bytes:
        found = _STATUS.match(head)
        reply.status = int(found[1]) if found else 599
        self._events = _EVENTS.search(head) is not None
        length = _LENGTH.search(head)
        self._left = -1 if length is None or _CHUNKED.search(head) else int(length[1])
        return rest

    def _read_body(self, reply: Reply, data: bytes, came_at: float) -> None:
        if self._keep:
            self._kept.append(data)
        if not reply.first_at and (not self._events or _TEXT.search(self._tail + data)):
            reply.first_at = came_at  # reading it is no part of it
        if self._events:
            reply.num_events += (self._tail[1 - len(_EVENT) :] + data).count(_EVENT)
        if self._left >= 0:
            self._left -= len(data)
            ended = self._left <= 0
            whole = True
        else:
            self._tail = (self._tail + data)[-400:]
            whole = not self._events or b"[DONE]" in self._tail
            ended = self._tail.endswith(_LAST_CHUNK)
        if ended:
            self._end(complete=whole and b'"error":' not in self._tail)

    def connection_lost(self, _error: Exception | None) -> None:
        """From the loop: it is gone."""
        self._transport = None
        self._end(complete=False)

    def close(self) -> None:
        """Closes it; a reply that waits ends incomplete."""
        if self._transport is not None:
            self._transport.close()

    def _end(self, *, complete: bool) -> None:
        reply, ended = self._reply, self._ended
        if reply is None or ended is None:
            return
        self._reply = None
        reply.ended_at = time.perf_counter()
        reply.complete = complete
        reply.body = b"".join(self._kept) if self._keep else self._tail
        if not ended.done():
            ended.set_result(reply)


@dataclass(slots=True)
class Loader:
    """Sends requests to one address over as many connections as they need."""

    endpoint: Endpoint
    _idle: list[Connection] = field(default_factory=list)
    _all: list[Connection] = field(default_factory=list)

    async def connection(self, *, is_new: bool = False) -> Connection:
        """An idle connection, or a new one."""
        while self._idle and not is_new:
            known = self._idle.pop()
            if known.usable:
                return known
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(Connection, self.endpoint.host, self.endpoint.port)
        self._all.append(made)
        return made

    async def one(
        self,
        payload: bytes,
        *,
        keep: bool = False,
        longest_s: float = LONGEST_S,
        is_alone: bool = False,
    ) -> Reply:
        """One request; what takes longer than `longest_s` is cut.

        Args:
            is_alone: it has a connection of its own, which ends with it.
        """
        wanted_at = time.perf_counter()
        connection = await self.connection(is_new=is_alone)
        cut = asyncio.get_running_loop().call_later(longest_s, connection.close)
        reply = await connection.send(payload, keep=keep, wanted_at=wanted_at)
        cut.cancel()
        if is_alone:
            connection.close()
            self._all.remove(connection)
        else:
            self._idle.append(connection)
        return reply

    async def closed_loop(
        self, payloads: Iterator[bytes], concurrency: int, seconds: float
    ) -> list[Reply]:
        """So many at a time, each followed by the next, until the time is over."""
        replies: list[Reply] = []
        until = time.perf_counter() + seconds

        async def caller() -> None:
            while time.perf_counter() < until:
                replies.append(await self.one(next(payloads)))

        await asyncio.gather(*(caller() for _ in range(concurrency)))
        return replies

    async def open_loop(
        self,
        payloads: Iterator[bytes],
        rate: float,
        seconds: float,
        *,
        seed: int,
        longest_s: float,
        are_alone: bool = False,
    ) -> list[Reply]:
        """Poisson arrivals, whatever comes back; what takes longer than `longest_s` is cut.

        Args:
            are_alone: each request has a connection of its own.
        """
        rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        replies: list[Reply] = []
        running: set[asyncio.Task[None]] = set()

        async def single() -> None:
            replies.append(await self.one(next(payloads), longest_s=longest_s, is_alone=are_alone))

        due = time.perf_counter()
        until = due + seconds
        while due < until:
            wait_s = due - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            task = loop.create_task(single())
            running.add(task)
            task.add_done_callback(running.discard)
            due += rng.expovariate(rate)
        while running:
            await asyncio.wait(running)
        return replies

    async def until_ok(
        self, payload: bytes, still_running: Callable[[], bool], timeout_s: float = 60.0
    ) -> None:
        """Waits until a request is answered.

        Raises:
            RuntimeError: the system ended, or did not answer in time.
        """
        deadline = time.perf_counter() + timeout_s
        while time.perf_counter() < deadline and still_running():
            try:
                # Asked too early, some never answer.
                reply = await self.one(payload, longest_s=2.0)
            except OSError:
                reply = Reply(0.0)
            if reply.ok:
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{self.endpoint} does not answer")

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()
