"""Both ends of the TCP data channel over loopback, with a target that records."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import RefusalReason, WorkerId
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataServer
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    PREFILL,
    RECEIVER,
    SENDER,
    STALL_S,
    RecordingTarget,
    reservation_at,
    reservation_behind,
    running_pair,
    tcp_pair,
    until,
    whole,
)


async def test_a_small_transfer_does_not_wait_for_a_large_one() -> None:
    async with tcp_pair(stall_timeout_s=5) as pair:
        large = asyncio.create_task(pair.pool.put(pair.reservation, whole(300)))
        await until(lambda: bool(pair.target.granted))

        await pair.pool.put(pair.reservation, [Run(0, 300, 1)])
        assert not large.done()
        await large


async def test_large_transfers_use_all_lanes_and_small_ones_open_none() -> None:
    async with tcp_pair(stall_timeout_s=5) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        assert pair.pool.statistics().open_channels == 1

        await pair.pool.put(pair.reservation, whole(300))

        assert pair.pool.statistics().open_channels == 2
        assert pair.sent.rtt_s > 0
        (view,) = pair.pool.statistics().views()
        assert view.goodput_bytes_s > 0
        assert view.transferred_bytes == 301 * BLOCK


async def test_a_budget_is_kept() -> None:
    rate = 100e6
    options = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=5, budget_bytes_s=rate)
    async with running_pair(options) as pair:
        started = asyncio.get_running_loop().time()

        await pair.pool.put(pair.reservation, whole(300))

        seconds = asyncio.get_running_loop().time() - started
        assert 300 * BLOCK / seconds <= rate * 1.15


async def test_a_budget_that_others_spend_is_not_the_silence_of_the_peer() -> None:
    rate = 10e6
    options = SendOptions(kinds=("tcp",), lanes=1, stall_timeout_s=STALL_S, egress_bytes_s=rate)
    async with running_pair(options) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        assert pair.pool.egress is not None
        # One waits for the budget, one for its turn on the connection.
        assert pair.pool.egress.delay(int(4 * STALL_S * rate)) > 3 * STALL_S
        await asyncio.gather(
            pair.pool.put(pair.reservation, whole(1)), pair.pool.put(pair.reservation, whole(1, 1))
        )
        assert (pair.sent.lost, pair.sent.resumed, pair.sent.channels) == (0, 0, 1)


async def test_what_arrived_of_a_slow_transfer_counts_before_all_has() -> None:
    total = 100 * BLOCK
    options = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=5, budget_bytes_s=20e6)
    async with running_pair(options) as pair:
        pool = pair.pool
        under_way = asyncio.create_task(pool.put(pair.reservation, whole(100)))

        await until(lambda: 0 < pool.sent_bytes < total or under_way.done())

        assert not under_way.done()
        assert pool.sent_bytes + pool.sending_bytes == total
        await under_way
        assert (pool.sent_bytes, pool.sending_bytes) == (total, 0)
        sending_s = pool.sending_s
        assert 0 < sending_s <= pair.sent.busy_s
        under_way = asyncio.create_task(pool.put(pair.reservation, whole(100)))
        await until(lambda: pool.sent_bytes > total or under_way.done())
        seen = pool.sent_bytes
        assert seen > total
        assert pool.sending_s > sending_s
        under_way.cancel()
        await asyncio.wait([under_way])
        assert under_way.cancelled()
        assert pool.sending_bytes == 0
        assert seen <= pool.sent_bytes <= 2 * total, "it left, and a total does not fall"
        assert pair.sent.bytes == total, "what was cut off is no KV"


async def test_the_egress_of_a_worker_is_one_budget_for_all_its_peers() -> None:
    options = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=5, egress_bytes_s=100e6)
    async with running_pair(options) as one, running_pair() as two:
        started = asyncio.get_running_loop().time()

        # One sender, two receivers.
        await asyncio.gather(
            one.pool.put(one.reservation, whole(150)), one.pool.put(two.reservation, whole(150))
        )

        seconds = asyncio.get_running_loop().time() - started
        assert 300 * BLOCK / seconds <= 100e6 * 1.15


async def test_another_incarnation_is_refused_at_hello() -> None:
    async with tcp_pair() as pair:
        reservation = reservation_behind(pair.reservation.data_endpoint, incarnation=6)

        with pytest.raises(RefusedError, match="identity: this is d0/7, not d0/6") as caught:
            await pair.pool.put(reservation, whole(1))

        assert caught.value.refusal.reason is RefusalReason.STALE
        assert pair.target.lost == []


async def test_a_receiver_that_dies_midway_is_lost_and_the_next_call_finds_its_successor() -> None:
    async with tcp_pair() as pair:
        closing: list[asyncio.Task[None]] = []
        pair.target.on_grant = lambda: closing.append(asyncio.create_task(pair.server.close()))

        with pytest.raises(LostError):
            await pair.pool.put(pair.reservation, whole(300))
        await closing[0]

        # Once, or twice if the sender's new connection came in before the server had closed.
        assert {ok for _, ok in pair.target.ended} == {False}
        assert set(pair.target.lost) == {PREFILL}
        target = RecordingTarget()
        identity = replace(RECEIVER, incarnation=8)
        successor = DataServer(identity, target)
        reservation = reservation_at(await successor.start(), incarnation=8)
        await pair.pool.put(reservation, whole(1))
        assert target.content(0, 1) == pair.source.read_view(0, 1)
        await successor.close()


async def test_a_channel_that_ended_is_opened_again() -> None:
    async with tcp_pair() as pair:
        await pair.pool.commit(pair.reservation, 1, 1)
        for task in list(pair.server._serving):
            task.cancel()
        await until(lambda: pair.pool.statistics().open_channels == 0)

        await pair.pool.commit(pair.reservation, 1, 1)

        assert len(pair.target.commits) == 2
        assert pair.sent.channels == 2


async def test_links_of_workers_that_left_are_dropped_when_another_comes() -> None:
    options = SendOptions(kinds=("tcp",), lanes=2)
    second = replace(RECEIVER, worker_id=WorkerId("d1"))
    async with running_pair(options) as pair:
        target = RecordingTarget()
        server = DataServer(second, target)
        there = replace(reservation_at(await server.start()), worker_id=second.worker_id)
        pool = ChannelPool(replace(SENDER, worker_id=WorkerId("p1")), pair.source, options)
        await pool.put(there, whole(2))
        assert {key.peer for key in server.statistics().links} == {"p1"}
        await server.close()
        target.pool.close()
        await until(lambda: pool.statistics().open_channels == 0)

        await pool.put(pair.reservation, whole(1))
        assert {key.peer for key in pool.statistics().links} == {DECODE}
        assert pool.sent_bytes == 3 * BLOCK
        await pool.close()
        await until(lambda: pair.server.statistics().open_channels == 0)

        await pair.pool.put(pair.reservation, [Run(0, 1, 3)])
        assert pair.target.content(1, 3) == pair.source.read_view(0, 3)
        assert {key.peer for key in pair.server.statistics().links} == {PREFILL}
