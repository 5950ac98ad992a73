"""Receivers that are not there, hang, die or talk nonsense, as a sender over TCP meets them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.codec import HEADER, encode_frame
from kvmesh.transfer.frames import CommitOkFrame, ErrorFrame, Frame, HelloOkFrame, PutOkFrame
from kvmesh.transfer.meters import LinkKey
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    SENDER,
    STALL_S,
    SourcePool,
    reservation_behind,
    until,
    whole,
)


@pytest.fixture
def source() -> Iterator[SourcePool]:
    source = SourcePool()
    yield source
    source.close()


def _pool(source: SourcePool, stall_timeout_s: float = STALL_S) -> ChannelPool:
    options = SendOptions(
        kinds=("tcp",), lanes=2, connect_timeout_s=5, stall_timeout_s=stall_timeout_s
    )
    return ChannelPool(SENDER, source, options)


async def test_nobody_at_the_endpoint_is_lost(source: SourcePool) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are rejected
        pool = _pool(source)
        with pytest.raises(LostError, match="data channel to"):
            await pool.commit(
                reservation_behind(Endpoint("127.0.0.1", unused.getsockname()[1])), 1, 1
            )
        await pool.close()


@contextlib.asynccontextmanager
async def _listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Endpoint]:
    """A server of plain bytes, for receivers that misbehave."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readexactly(HEADER.size)
    await reader.readexactly(int.from_bytes(head[8:12], "little"))
    writer.write(encode_frame(HelloOkFrame(DECODE, 7)))


async def test_a_receiver_that_stops_reading_is_noticed_in_the_stall_time(
    source: SourcePool,
) -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await released.wait()

    async with _listening(serve) as endpoint:
        pool = _pool(source)
        started = asyncio.get_running_loop().time()
        with pytest.raises(LostError, match=r"no progress for 0\.3 s"):
            await pool.put(reservation_behind(endpoint), whole(300))
        assert asyncio.get_running_loop().time() - started < 10 * STALL_S
        assert pool.statistics().links[LinkKey(DECODE, "tcp", "sent")].lost == 1
        released.set()
        await pool.close()


async def test_a_receiver_that_never_answers_is_noticed_in_the_stall_time(
    source: SourcePool,
) -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        await released.wait()

    async with _listening(serve) as endpoint:
        pool = _pool(source)
        with pytest.raises(LostError, match="no progress"):
            await pool.commit(reservation_behind(endpoint), 1, 1)
        released.set()
        await pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        PutOkFrame(77, 1),
        PutOkFrame(1, 2**63),
        CommitOkFrame(1),
        HelloOkFrame(DECODE, 7),
        ErrorFrame(0, "bad_magic", "no"),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(28),
        encode_frame(PutOkFrame(1, BLOCK))[:-1],
        b"",
    ],
)
async def test_a_receiver_that_answers_nonsense_is_lost(
    source: SourcePool, answer: Frame | bytes
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        await reader.readexactly(HEADER.size + BLOCK)
        writer.write(answer if isinstance(answer, bytes) else encode_frame(answer))
        await writer.drain()

    async with _listening(serve) as endpoint:
        pool = _pool(source)
        with pytest.raises(LostError):
            await pool.put(reservation_behind(endpoint), whole(1))
        await until(lambda: pool.statistics().open_channels == 0)
        await pool.close()


@pytest.mark.parametrize("said", [PutOkFrame(2, 1), PutOkFrame(1, BLOCK)], ids=["part", "again"])
async def test_a_receiver_that_talks_on_and_answers_nothing_loses_its_connection(
    source: SourcePool, said: Frame
) -> None:
    """It is never silent for the stall time; a second connection is asked once more."""
    released, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for answer in (PutOkFrame(1, BLOCK), said):
                head = await reader.readexactly(HEADER.size)
                await reader.readexactly(int.from_bytes(head[8:12], "little") + BLOCK)
                await reader.readexactly(4)
                writer.write(encode_frame(answer))
            while not released.is_set():
                await asyncio.sleep(STALL_S / 5)
                writer.write(encode_frame(said))
                await writer.drain()
        ended.set()

    async with _listening(serve) as endpoint, asyncio.timeout(20):
        pool = _pool(source)
        await pool.put(reservation_behind(endpoint), whole(1))
        await pool.put(reservation_behind(endpoint), whole(1))
        assert pool.statistics().links[LinkKey(DECODE, "tcp", "sent")].resumed == 1
        released.set()
        await ended.wait()
        await pool.close()


async def test_a_put_that_is_cancelled_twice_cuts_the_channel(source: SourcePool) -> None:
    released = asyncio.Event()
    greeted = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        greeted.set()
        await released.wait()

    async with _listening(serve) as endpoint:
        # Longer than the test may take: nothing but the second cancellation ends it.
        pool = _pool(source, stall_timeout_s=300)
        task = asyncio.create_task(pool.put(reservation_behind(endpoint), whole(300)))
        await greeted.wait()
        await until(lambda: pool.statistics().open_channels == 1)
        for _ in range(200):  # let the send fill the socket
            await asyncio.sleep(0)

        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: pool.statistics().open_channels == 0)
        released.set()
        await pool.close()
