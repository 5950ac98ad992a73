"""A relay that lets so many bytes per second through, for links that are slower than this host.

It delays what it carries and changes nothing. Both ends see TCP, so they measure it as any link.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

FRONT = "127.0.0.2"
"""Where the relay listens; a worker that advertises it is reached through the relay."""

_CHUNK = 64 << 10


@dataclass(slots=True)
class Pace:
    """What all connections of a link share; may be changed while it is up.

    Attributes:
        bytes_s: 0 is no bound.
        free_at: when all bytes so far would be through, on the clock of `time.monotonic`.
    """

    bytes_s: float = 0.0
    free_at: float = 0.0

    async def wait(self, num_bytes: int) -> None:
        """Waits until so many more bytes would be through."""
        if not self.bytes_s:
            return
        now = time.monotonic()
        self.free_at = max(self.free_at, now) + num_bytes / self.bytes_s
        await asyncio.sleep(self.free_at - now)


def free_port() -> int:
    """A port that nobody has on either side of the relay now."""
    with socket.socket() as back, socket.socket() as front:
        back.bind(("127.0.0.1", 0))
        port: int = back.getsockname()[1]
        front.bind((FRONT, port))
        return port


@contextlib.asynccontextmanager
async def paced_link(port: int, pace: Pace) -> AsyncIterator[None]:
    """Carries what comes to `FRONT` to the same port of this host, until the block ends."""
    carrying: set[asyncio.Task[None]] = set()

    async def serve(near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        carrying.add(task)
        try:
            far, ask = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.TaskGroup() as both:
                both.create_task(_carry(near, ask, Pace()))
                both.create_task(_carry(far, answer, pace))
        finally:
            carrying.discard(task)

    server = await asyncio.start_server(serve, FRONT, port)
    try:
        yield
    finally:
        server.close()
        for task in carrying:
            task.cancel()
        await asyncio.gather(*carrying, return_exceptions=True)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, pace: Pace) -> None:
    """One direction, to its end."""
    with contextlib.suppress(ConnectionError):
        while data := await source.read(_CHUNK):
            await pace.wait(len(data))
            sink.write(data)
            await sink.drain()
    sink.close()
