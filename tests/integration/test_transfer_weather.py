"""Transfers over the kernel's TCP while packets are lost, late, out of order or too many."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvmesh.core.errors import LostError
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.frames import Checksum
from kvmesh.transfer.local_channel import LocalHub
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
