"""Transfers over the kernel's TCP while packets are lost, late, out of order or too many."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core.errors import LostError
from kvmesh.core.types import Endpoint, WorkerId
from kvmesh.policy.congestion import CongestionMeter, LinkCounts, LinkName
from kvmesh.policy.offload import AdjustReason, Threshold
from kvmesh.policy.threshold_loop import ThresholdLoop, ThresholdReading
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.frames import Checksum
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.sockets import connect, listen, suit_path
from tests.packet_link import FAR, PacketLink, Weather, missing, packet_link
from tests.transfer_pair import (
    BLOCK,
    NUM_BLOCKS,
    RECEIVER,
    SENDER,
    Pair,
    RecordingTarget,
    SourcePool,
    reservation_behind,
    until,
    whole,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "a packet link can be made")

STALL_S = 2.0
_TCP_CONGESTION = 13
_AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
LONG = "bbr" if "bbr" in _AVAILABLE.read_text().split() else "cubic"
SEND = SendOptions(
    kinds=("tcp",),
    lanes=2,
    checksum=Checksum.CRC32C,
    stall_timeout_s=STALL_S,
    connect_timeout_s=STALL_S,
)


@contextlib.asynccontextmanager
async def pair_over(link: PacketLink) -> AsyncIterator[Pair]:
    """A receiver at the far end and a sender at the near one."""
    source, target, hub = SourcePool(), RecordingTarget(), LocalHub()
    options = ReceiveOptions(kinds=("tcp",), host=FAR, stall_timeout_s=STALL_S)
    server = DataServer(RECEIVER, target, options, hub=hub)
    pool = ChannelPool(SENDER, source, SEND, hub=hub)
    with link.far():
        address = await server.start()
    try:
        with link.near():  # connections are made whenever one is needed
            reservation = reservation_behind(address.endpoint)
            yield Pair(source, target, server, pool, reservation, [], "tcp")
            await pool.close()
    finally:
        await pool.close()
        await server.close()
        source.close()
        target.check_grants_ended_once()


def assert_all_landed(pair: Pair) -> None:
    assert pair.target.content(0, NUM_BLOCKS) == pair.source.read_view(0, NUM_BLOCKS)
    assert all(ok for _, ok in pair.target.ended)
    assert len(pair.target.commits) == 1
    assert pair.sent.queued_bytes == 0


@pytest.mark.parametrize(
    ("weather", "retransmits"),
    [
        (Weather(loss=0.02), True),
        (Weather(delay_s=0.005), False),
        (Weather(delay_s=0.002, reorder=0.2), False),
        (Weather(loss=0.01, delay_s=0.002, reorder=0.05), True),
        (Weather(rate="200mbit"), False),
    ],
    ids=["loss", "delay", "reorder", "all", "rate"],
)
async def test_bytes_arrive_whatever_happens_to_packets(
    weather: Weather, retransmits: bool
) -> None:
    with packet_link(weather) as link:
        async with pair_over(link) as pair:
            await pair.pool.put(pair.reservation, whole(NUM_BLOCKS))
            pair.pool.statistics()
            assert (pair.sent.retransmits > 0) >= retransmits
            assert pair.sent.rtt_s >= 2 * weather.delay_s * (1 - weather.reorder) * 0.5
            await pair.pool.commit(pair.reservation, 7, 70)
            assert_all_landed(pair)
        assert (link.dropped > 0) == (weather.loss > 0)


def control_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, 16).split(b"\0")[0].decode()


async def controls(listener: socket.socket, sender: socket.socket) -> list[str]:
    """Congestion control at both ends of a connection."""
    loop = asyncio.get_running_loop()
    receiver, _ = await loop.sock_accept(listener)
    with listener, sender, receiver:
        suit_path(receiver)
        return [control_of(sender), control_of(receiver)]


async def test_a_long_path_gets_bbr_at_both_ends() -> None:
    with packet_link(Weather(delay_s=0.015)) as link:
        with link.far():
            listener = await listen(FAR, 0)
        with link.near():
            sender = await connect(Endpoint(FAR, listener.getsockname()[1]))
        assert await controls(listener, sender) == [LONG, LONG]


async def test_a_short_path_keeps_cubic() -> None:
    listener = await listen("127.0.0.1", 0)
    sender = await connect(Endpoint("127.0.0.1", listener.getsockname()[1]))
    assert await controls(listener, sender) == ["cubic", "cubic"]


async def test_a_link_that_goes_silent_fails_in_the_stall_time_and_fences_the_blocks() -> None:
    with packet_link(Weather(delay_s=0.001)) as link:
        async with pair_over(link) as pair:
            now = asyncio.get_running_loop().time

            def cut() -> None:
                link.weather.is_cut = True

            pair.target.on_grant = cut
            started = now()
            with pytest.raises(LostError):
                await pair.pool.put(pair.reservation, whole(NUM_BLOCKS))
            assert now() - started < 5 * STALL_S
            await until(lambda: not pair.target.open_grants)


async def test_a_link_that_comes_back_in_time_costs_nothing_but_time() -> None:
    with packet_link(Weather(delay_s=0.001)) as link:
        async with pair_over(link) as pair:
            timer: list[asyncio.TimerHandle] = []

            def cut() -> None:
                if not timer:
                    link.weather.is_cut = True
                    timer.append(asyncio.get_running_loop().call_later(STALL_S / 4, mend))

            def mend() -> None:
                link.weather.is_cut = False

            pair.target.on_grant = cut
            await pair.pool.put(pair.reservation, whole(NUM_BLOCKS))
            await pair.pool.commit(pair.reservation, 7, 70)
            assert_all_landed(pair)
            assert pair.sent.bytes == NUM_BLOCKS * BLOCK
            assert link.dropped > 0


async def test_a_slow_link_is_no_stall() -> None:
    with packet_link(Weather(rate="40mbit", delay_s=0.005)) as link:
        async with pair_over(link) as pair:
            pair.reservation = replace(pair.reservation, num_blocks=160)
            await pair.pool.put(pair.reservation, whole(160))
            assert pair.sent.resumed == 0
            assert pair.target.content(0, 160) == pair.source.read_view(0, 160)


@contextlib.asynccontextmanager
async def others_sending(link: PacketLink) -> AsyncIterator[None]:
    """Four connections of somebody else, from the near end to the far one, that never stop."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(1 << 16):
                pass
        finally:  # the end of the link is not told to this side
            writer.close()

    async def send(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    with link.far():
        server = await asyncio.start_server(take, FAR, 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.TaskGroup() as group, server:
        with link.near():
            writers = [(await asyncio.open_connection(FAR, port))[1] for _ in range(4)]
        tasks = [group.create_task(send(writer)) for writer in writers]
        yield
        for task, writer in zip(tasks, writers, strict=True):
            task.cancel()
            writer.transport.abort()


async def test_others_on_the_link_are_noticed_although_nothing_of_ours_waits() -> None:
    """Only the round trips show it: all that was asked for has arrived in each cycle."""
    bandwidth, loop = 100e6 / 8, asyncio.get_running_loop()
    meter, name = CongestionMeter(), LinkName(WorkerId("far"), 1, WorkerId("home"))
    with_signs, without = (ThresholdLoop(Threshold(512, 512), bandwidth) for _ in range(2))
    with packet_link(Weather(rate="100mbit")) as link:
        async with pair_over(link) as pair:

            async def cycle(num_blocks: int = 32) -> tuple[AdjustReason, AdjustReason]:
                started, before = loop.time(), pair.sent.bytes
                await pair.pool.put(pair.reservation, whole(num_blocks))
                elapsed_s, now = loop.time() - started, pair.sent
                sent = now.bytes - before
                counts = LinkCounts(now.bytes, now.retransmits, now.rtt_s)
                signs = meter.observe([(name, counts)])
                reading = ThresholdReading(sent, 0, 0, 0, 1, 1, sending=1.0)
                without.cycle(reading, elapsed_s)
                with_signs.cycle(replace(reading, with_signs=signs), elapsed_s)
                return with_signs.threshold.reason, without.threshold.reason

            await pair.pool.put(pair.reservation, whole(1))  # opens the connections
            for num_blocks in (1, 1, 32):
                await cycle(num_blocks)
            async with others_sending(link):
                found = [await cycle() for _ in range(6)]
    assert AdjustReason.LINK_FULL in {with_them for with_them, _ in found}
    # The first one may have had the link to itself for a while.
    assert {alone for _, alone in found[1:]} <= {AdjustReason.CALM, AdjustReason.RECOVERING}
