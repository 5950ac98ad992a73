"""An OpenAI server that computes nothing, for the routers beside ours in `benchmarks.gateway`.

Answers as `benchmarks.gateway_worker` does, at the same pace; a prompt that finds all slots taken
waits in a queue, as in the engines that those routers are made for.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, cast

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: "
_SSE = _HEAD + b"text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(event: bytes) -> bytes:
    data = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(delta: dict[str, Any], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    body = {
        "id": "chatcmpl-0123456789abcdef01234567",
        "created": 1_700_000_000,
        "model": "fake",
        "object": "chat.completion.chunk",
        "choices": [choice],
    }
    return json.dumps(body, separators=(",", ":")).encode()


_OPENING = _chunk(_event({"role": "assistant", "content": ""}, None))
_WORD = _chunk(_event({"content": " word"}, None))
_LAST = _chunk(_event({"content": " word"}, "length")) + _chunk(b"[DONE]") + b"0\r\n\r\n"


def _whole(num_tokens: int) -> bytes:
    message = {"role": "assistant", "content": " word" * num_tokens}
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 1 + num_tokens}
    body = {
        "id": "chatcmpl-0123456789abcdef01234567",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": usage,
    }
    return _answer(json.dumps(body).encode())


def _answer(content: bytes) -> bytes:
    return _HEAD + b"application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


_FACTS = _answer(
    json.dumps(
        {
            "status": "ok",
            "model_path": "fake",
            "served_model_name": "fake",
            "is_generation": True,
            "object": "list",
            "data": [{"id": "fake", "object": "model", "created": 0, "owned_by": "bench"}],
        }
    ).encode()
)


@dataclass(slots=True, eq=False)
class Stream:
    """A request being answered."""

    client: Client
    left: int
    streamed: bool


class Engine:
    """Prefills in order, then one token per step for all."""

    def __init__(self) -> None:
        self.prefill_s, self.slots, self.step_s = 0.0, 4096, 0.0
        self._waiting: deque[Stream] = deque()
        self._busy = 0
        self._running: list[Stream] = []
        self._wake = asyncio.Event()

    def add(self, stream: Stream) -> None:
        """Takes a request."""
        if not self.prefill_s:
            self._first(stream)
            return
        self._waiting.append(stream)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._busy < self.slots:
            self._busy += 1
            stream = self._waiting.popleft()
            asyncio.get_running_loop().call_later(self.prefill_s, self._prefilled, stream)

    def _prefilled(self, stream: Stream) -> None:
        self._busy -= 1
        self._first(stream)
        self._start()

    def _first(self, stream: Stream) -> None:
        if not stream.streamed:
            stream.client.answer(_whole(stream.left))
            return
        stream.client.write(_SSE + _OPENING)
        self._token(stream)
        if stream.left and not stream.client.lost:
            self._running.append(stream)
            self._wake.set()

    def _token(self, stream: Stream) -> None:
        stream.left -= 1
        if stream.left:
            stream.client.write(_WORD)
        else:
            stream.client.answer(_LAST)

    async def run_steps(self) -> None:
        """Decodes until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            due = loop.time()
            while self._running:
                due = max(due + self.step_s, loop.time())
                await asyncio.sleep(due - loop.time())
                running, self._running = self._running, []
                for stream in running:
                    if not stream.client.lost:
                        self._token(stream)
                self._running += [s for s in running if s.left and not s.client.lost]
            self._wake.clear()


class Client(asyncio.Protocol):
    """One connection of the router."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._answering = False

    @property
    def lost(self) -> bool:
        """Whether nobody reads any more."""
        return self._transport is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """From the loop."""
        # Not a subclass under uvloop, but all that is needed of one.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        """From the loop."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """From the loop."""
        self._buffer += data
        self._next()

    def write(self, data: bytes) -> None:
        """A part of an answer."""
        if self._transport is not None:
            self._transport.write(data)

    def answer(self, data: bytes) -> None:
        """The last part of an answer."""
        self.write(data)
        self._answering = False
        if self._buffer:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._answering:
            return
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        body, left = _body(head, rest)
        if body is None:
            return
        self._buffer = left
        self._answering = True
        if not head.startswith(b"POST"):
            self.answer(_FACTS)
            return
        asked = json.loads(body)
        num_tokens = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        self._engine.add(Stream(self, num_tokens, bool(asked.get("stream"))))


def _body(head: bytes, rest: bytes) -> tuple[bytes | None, bytes]:
    """A request's body and what follows it; None while it is not all here."""
    lines = head.lower().split(b"\r\n")
    for line in lines:
        if line.startswith(b"content-length:"):
            length = int(line[15:])
            return (None, rest) if len(rest) < length else (rest[:length], rest[length:])
    if any(line.startswith(b"transfer-encoding:") for line in lines):
        parts = []
        while True:
            size, separator, rest = rest.partition(b"\r\n")
            length = int(size or b"0", 16) if separator else -1
            if length < 0 or len(rest) < length + 2:
                return None, rest
            parts.append(rest[:length])
            rest = rest[length + 2 :]
            if not length:
                return b"".join(parts), rest
    return b"", rest


async def main() -> None:
    """Serves until standard input ends; its lines change the pace."""
    engine = Engine()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(engine), "127.0.0.1", 0)
    steps = asyncio.create_task(engine.run_steps())
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        wish = {"prefill_s": 0.0, "slots": 4096, "step_s": 0.0, **json.loads(line)}
        engine.prefill_s, engine.slots = wish["prefill_s"], wish["slots"]
        engine.step_s = wish["step_s"]
        sys.stdout.write("changed\n")
        sys.stdout.flush()
    steps.cancel()
    server.close()


if __name__ == "__main__":
    uvloop.run(main())
