"""Transfers that are cancelled, or too large for a slow link or budget, take no others along."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.core.errors import LostError
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.stall import PaceWatch
from kvmesh.transfer.tcp_channel import TcpChannel
from tests.faulty_link import Faults, faulty_link
from tests.transfer_pair import (
    BLOCK,
    Pair,
    reservation_behind,
    running_pair,
    until,
    whole,
)

WINDOW_S = 60.0
"""No window ends by itself in these tests."""


@pytest.mark.parametrize("num_blocks", [1, 300])
async def test_a_transfer_cancelled_before_its_first_turn_leaves_the_lane_to_others(
    num_blocks: int,
) -> None:
    async with running_pair(SendOptions(kinds=("tcp",), lanes=1, egress_bytes_s=1e6)) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        egress = pair.pool.egress
        assert egress is not None
        egress.delay(1 << 40)  # nobody has a turn for days
        waiting = asyncio.create_task(pair.pool.put(pair.reservation, whole(num_blocks, 1)))
        await until(lambda: not egress.is_idle)
        behind = asyncio.create_task(pair.pool.put(pair.reservation, whole(1, 310)))
        await asyncio.sleep(0)

        while not waiting.done():  # at first a large one lets the pieces that it began end
            waiting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: not egress.is_idle)
        assert not behind.done(), "its turn for the lane has come, and it waits for the budget"
        behind.cancel()
        with pytest.raises(asyncio.CancelledError):
            await behind

        await pair.pool.commit(pair.reservation, 7, 16)
        assert pair.sent.channels == 1, "no connection was cut"
        assert (pair.sent.queued_bytes, egress.is_idle) == (0, True)


def watch_of(pair: Pair) -> PaceWatch:
    (slot,) = pair.pool._slots.values()
    assert isinstance(slot.channel, TcpChannel)
    return slot.channel._pace


def begin_window(watch: PaceWatch) -> None:
    watch.close()
    watch._under_way = dict.fromkeys(watch._under_way, True)
    watch._watch()


async def test_a_slow_link_lets_go_what_does_not_fit_and_carries_the_rest() -> None:
    options = SendOptions(
        kinds=("tcp",), lanes=2, stall_timeout_s=WINDOW_S, patience_s=WINDOW_S / 2
    )
    async with running_pair(options) as pair:
        faults = Faults(bytes_per_s=60e6)
        async with faulty_link(pair.reservation.data_endpoint, faults) as endpoint:
            pair.reservation = reservation_behind(endpoint)
            large = asyncio.create_task(pair.pool.put(pair.reservation, whole(300)))
            await until(lambda: bool(pair.target.granted) and pair.sent.channels == 2)
            small = asyncio.create_task(pair.pool.put(pair.reservation, whole(10, 300)))
            await until(lambda: pair.sent.queued_bytes == 310 * BLOCK)
            watch = watch_of(pair)
            watch._moved = lambda: watch._seen + 20 * BLOCK  # of which half is there in time
            watch._tick()

            with pytest.raises(LostError, match="the link is too slow"):
                await large
            await small
            assert pair.target.content(300, 10) == pair.source.read_view(300, 10)
            assert (pair.sent.channels, pair.sent.resumed) == (2, 0), "nothing was cut"
            assert pair.sent.queued_bytes == 0
            await pair.pool.close()


async def test_what_is_alone_on_a_slow_link_is_let_go_at_once() -> None:
    options = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=WINDOW_S, patience_s=WINDOW_S)
    async with running_pair(options) as pair:
        faults = Faults(stall_at=2 << 20)
        async with faulty_link(pair.reservation.data_endpoint, faults) as endpoint:
            pair.reservation = reservation_behind(endpoint)
            large = asyncio.create_task(pair.pool.put(pair.reservation, whole(300)))
            await until(lambda: bool(pair.target.granted))
            watch = watch_of(pair)
            watch._moved = lambda: watch._seen + 1
            watch._tick()
            with pytest.raises(LostError, match="the link is too slow: 1 bytes in 60 s"):
                await large
            await pair.pool.close()


async def test_a_budget_that_is_too_small_for_two_peers_serves_the_first() -> None:
    """Judged by link, each of both has half of the budget, too little, and both would be lost."""
    options = SendOptions(
        kinds=("tcp",),
        lanes=2,
        stall_timeout_s=WINDOW_S,
        patience_s=2 * WINDOW_S,
        egress_bytes_s=40e6,
    )
    async with running_pair(options) as one, running_pair() as two:
        pool, egress = one.pool, one.pool.egress
        assert egress is not None
        assert pool._leaving is not None
        first = asyncio.create_task(pool.put(one.reservation, whole(250)))
        await until(lambda: not egress.is_idle)
        second = asyncio.create_task(pool.put(two.reservation, whole(250)))
        leaving = pool._leaving
        await until(lambda: len(leaving._under_way) == 2)
        channels = [slot.channel for slot in pool._slots.values()]
        watches = [each._pace for each in channels if isinstance(each, TcpChannel)]
        watches.append(leaving)
        for watch in watches:
            begin_window(watch)
        # What fits into the patience, twice as many, is more than one and less than both.
        enough = egress.handed_bytes + 140 * BLOCK
        await until(lambda: egress.handed_bytes > enough)
        for watch in watches:
            watch._tick()

        with pytest.raises(LostError, match="the budget is too small"):
            await second
        await first
        assert one.target.content(0, 250) == one.source.read_view(0, 250)
        links = pool.statistics().links.values()
        assert sum(link.queued_bytes for link in links) == 0
        assert sum(link.resumed for link in links) == 0, "no connection was cut"
        assert egress.is_idle


async def test_a_budget_that_nobody_waits_for_is_not_what_is_too_small() -> None:
    """Large turns are few on a slow link, so that little is handed out while much moves."""
    options = SendOptions(
        kinds=("tcp",), lanes=2, stall_timeout_s=WINDOW_S, patience_s=WINDOW_S, egress_bytes_s=4e9
    )
    async with running_pair(options) as pair:
        assert pair.pool._leaving is not None
        faults = Faults(stall_at=2 << 20)
        async with faulty_link(pair.reservation.data_endpoint, faults) as endpoint:
            pair.reservation = reservation_behind(endpoint)
            large = asyncio.create_task(pair.pool.put(pair.reservation, whole(300)))
            await until(lambda: bool(pair.target.granted))
            leaving, egress = pair.pool._leaving, pair.pool.egress
            assert egress is not None
            (rest,) = leaving._under_way
            # At first pieces wait for the budget, too; the window here is much shorter than that.
            await until(lambda: egress.is_idle)
            begin_window(leaving)
            leaving._moved = lambda: leaving._seen + 1
            leaving._tick()
            assert not rest.given_up
            await pair.pool.close()
            with pytest.raises(LostError):
                await large
