"""A relay between a sender and a receiver that cuts, delays or slows what passes, at any byte.

In user space, since not every kernel has `tc netem`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvmesh.core.types import Endpoint

_CHUNK = 64 << 10
_DRIP_S = 0.02


@dataclass
class Faults:
    """What the link does to the bytes that go towards the receiver.

    Attributes:
        cut_at: byte counts, over all connections, at which the connection that carries it is cut.
        stall_at: from this byte count on nothing passes.
        delay_s: added to each piece, in both directions.
        bytes_per_s: 0 is no bound.
        drip_at, answers_drip_at: from this byte count on, towards the receiver or back, bytes pass
            one at a time: the link is never silent.
    """

    cut_at: list[int] = field(default_factory=list)
    stall_at: int | None = None
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    drip_at: int | None = None
    answers_drip_at: int | None = None
    passed: int = 0
    connections: int = 0


@contextlib.asynccontextmanager
async def faulty_link(to: Endpoint, faults: Faults) -> AsyncIterator[Endpoint]:
    """A relay in front of a receiver; gives the address that senders use."""
    released = asyncio.Event()
    serving: set[asyncio.Task[None]] = set()

    async def towards(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            if faults.stall_at is not None and faults.passed + len(data) > faults.stall_at:
                await released.wait()
                return
            await _pause(faults, len(data))
            if faults.cut_at and faults.passed + len(data) >= faults.cut_at[0]:
                keep = faults.cut_at.pop(0) - faults.passed
                faults.passed += keep
                writer.write(data[:keep])
                await writer.drain()
                return
            await _pass_on(writer, data, faults.drip_at, faults.passed)
            faults.passed += len(data)

    async def back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(_CHUNK):
            await _pause(faults, 0)
            await _pass_on(writer, data, faults.answers_drip_at, passed)
            passed += len(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        faults.connections += 1
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        serving.add(task)
        task.add_done_callback(serving.discard)
        try:
            peer_reader, peer_writer = await asyncio.open_connection(to.host, to.port)
        except OSError:
            writer.close()
            return
        directions = [
            asyncio.ensure_future(towards(reader, peer_writer)),
            asyncio.ensure_future(back(peer_reader, writer)),
            asyncio.ensure_future(_set(released)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            for each in (writer, peer_writer):
                each.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        released.set()
        server.close()
        if serving:
            await asyncio.wait(serving)


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _pause(faults: Faults, num_bytes: int) -> None:
    pause_s = faults.delay_s
    if faults.bytes_per_s:
        pause_s += num_bytes / faults.bytes_per_s
    if pause_s:
        await asyncio.sleep(pause_s)


async def _pass_on(
    writer: asyncio.StreamWriter, data: bytes, drip_at: int | None, passed: int
) -> None:
    at_once = len(data) if drip_at is None else max(0, drip_at - passed)
    writer.write(data[:at_once])
    await writer.drain()
    for byte in data[at_once:]:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(_DRIP_S)
