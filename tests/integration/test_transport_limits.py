"""What a host runs out of, and peers that stop in the middle, over each kind of socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint, HostRoute, Reservation
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.codec import HEADER, encode_frame
from kvmesh.transfer.data_server import ReceiveOptions
from kvmesh.transfer.frames import HelloOkFrame
from kvmesh.transfer.host import host_id
from kvmesh.transfer.meters import LinkKey
from tests.descriptors import no_descriptor_left
from tests.transfer_pair import (
    DECODE,
    SENDER,
    STALL_S,
    SourcePool,
    reservation_behind,
    running_pair,
    until,
    whole,
)

KINDS = pytest.mark.parametrize("kind", ["tcp", "shm"])
Behave = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@KINDS
async def test_a_sender_without_a_descriptor_loses_the_transfer_and_the_next_one_goes(
    kind: str,
) -> None:
    async with running_pair(SendOptions(kinds=(kind,))) as pair:
        with no_descriptor_left(), pytest.raises(LostError, match="Too many open files"):
            await pair.pool.put(pair.reservation, whole(4))
        assert pair.pool.statistics().open_channels == 0
        await pair.pool.put(pair.reservation, whole(4))
        assert pair.target.content(0, 4) == pair.source.read_view(0, 4)
        assert pair.sent.queued_bytes == 0


async def test_a_receiver_without_a_descriptor_takes_the_connection_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_pair(SendOptions(kinds=("tcp",), lanes=2)) as pair:
        await pair.pool.put(pair.reservation, whole(1))  # all that is opened once is open
        endpoint = pair.reservation.data_endpoint
        client = socket.socket()
        client.setblocking(False)
        with client:
            with no_descriptor_left():
                with contextlib.suppress(BlockingIOError):
                    client.connect((endpoint.host, endpoint.port))
                # Said again at every try, of which there are several where cores are busy.
                await until(lambda: "data_accept_failed" in caplog.messages)
            assert len(pair.server._serving) == 1
            await pair.pool.put(pair.reservation, whole(2, 1))
            assert pair.target.content(1, 2) == pair.source.read_view(1, 2)
            await until(lambda: len(pair.server._serving) == 2)


async def test_a_host_without_a_place_for_a_socket_is_reached_over_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/proc/nowhere")
    async with running_pair(SendOptions(kinds=("shm", "tcp"))) as pair:
        assert pair.reservation.host_route is None
        await pair.pool.put(pair.reservation, whole(4))
        assert set(pair.pool.statistics().links) == {LinkKey(DECODE, "tcp", "sent")}


@contextlib.asynccontextmanager
async def receiver(kind: str, behave: Behave, folder: Path) -> AsyncIterator[Reservation]:
    """One that greets, and behaves from then on; gives the way there."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(HEADER.size)
        await reader.readexactly(int.from_bytes(head[8:12], "little"))
        writer.write(encode_frame(HelloOkFrame(DECODE, 7)))
        try:
            await behave(reader, writer)
        finally:
            writer.close()

    if kind == "shm":
        path = str(folder / "data")
        server: asyncio.Server = await asyncio.start_unix_server(serve, path)
        there = replace(
            reservation_behind(Endpoint("127.0.0.1", 1)), host_route=HostRoute(host_id(), path)
        )
    else:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        there = reservation_behind(Endpoint(*server.sockets[0].getsockname()))
    async with server:
        yield there


@contextlib.asynccontextmanager
async def sender(kind: str) -> AsyncIterator[ChannelPool]:
    source = SourcePool()
    options = SendOptions(kinds=(kind,), connect_timeout_s=5, stall_timeout_s=STALL_S)
    pool = ChannelPool(SENDER, source, options)
    try:
        yield pool
        (link,) = pool.statistics().links.values()
        assert (link.lost, link.queued_bytes) == (1, 0)
        await until(lambda: pool.statistics().open_channels == 0)
    finally:
        await pool.close()
        source.close()


@KINDS
async def test_a_receiver_that_stops_reading_in_the_middle_is_lost_in_the_stall_time(
    kind: str, tmp_path: Path
) -> None:
    over = asyncio.Event()

    async def read_a_little(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(60)  # into the first frame, and of its payload nothing
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await over.wait()

    async with receiver(kind, read_a_little, tmp_path) as there, sender(kind) as pool:
        with pytest.raises(LostError, match=r"no progress for 0\.3 s"):
            await pool.put(there, whole(300))
        over.set()


@KINDS
async def test_a_connection_that_is_reset_in_the_middle_of_a_frame_is_lost_at_once(
    kind: str, tmp_path: Path
) -> None:
    resets = 0

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal resets
        await reader.readexactly(60)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        resets += 1
        writer.transport.abort()

    async with receiver(kind, reset, tmp_path) as there, sender(kind) as pool:
        with pytest.raises(LostError, match=r"reset|Broken pipe|closed by the peer"):
            await pool.put(there, whole(300))
    assert resets >= 1


@KINDS
async def test_a_sender_that_is_reset_in_the_middle_of_a_frame_leaves_no_grant(kind: str) -> None:
    options = ReceiveOptions(stall_timeout_s=30)  # noticed by itself, and not by silence
    async with running_pair(SendOptions(kinds=(kind,), lanes=1), options) as pair:
        cut: list[None] = []

        def reset_all() -> None:
            if cut:
                return
            cut.append(None)
            (slot,) = pair.pool._slots.values()
            channel = slot.channel
            lanes = [channel._lane] if kind == "shm" else channel.lanes()  # type: ignore[union-attr]
            for lane in lanes:
                lane.cut("reset by a test")

        pair.target.on_grant = reset_all
        with contextlib.suppress(LostError):  # over TCP it goes on by another connection
            await pair.pool.put(pair.reservation, whole(300))
        assert cut
        await until(lambda: not pair.target.open_grants)
        await pair.pool.put(pair.reservation, whole(300))
        assert pair.target.content(0, 300) == pair.source.read_view(0, 300)
