"""Staging memory: who gets which part of it when, and what its ends leave behind."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from kvmesh.core.clock import SystemClock
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import RefusalReason, WorkerId
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.device import Pieces, pieces_of
from kvmesh.transfer.frames import BlockPart, BlockRun, GetFrame
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.pacing import Pacer, Share
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.reader import BlockReader, ReadLease
from kvmesh.transfer.server_channel import owner_of
from kvmesh.transfer.staging import Spaces, StagingRing, Within
from kvmesh.transfer.target import ReadGrant
from tests.device_twin import TwinPool
from tests.transfer_pair import (
    BLOCK,
    LAYOUT,
    NUM_BLOCKS,
    RECEIVER,
    SENDER,
    RecordingTarget,
    SourcePool,
    reservation_at,
    running_pair,
    until,
    whole,
)


def pieces(num_blocks: int) -> Pieces:
    return pieces_of([(0, num_blocks)], BLOCK, None)


def test_spaces_never_overlap_and_merge_when_all_is_free() -> None:
    draw, spaces = random.Random(5), Spaces(64)
    held: list[tuple[int, int]] = []
    for _ in range(500):
        count = draw.randint(1, 20)
        first = spaces.take(count, "a")
        if first is not None:
            assert all(first + count <= f or f + n <= first for f, n in held)
            held.append((first, count))
        elif held:
            spaces.give_back(*held.pop(draw.randrange(len(held))), "a")
        assert spaces.num_free == 64 - sum(count for _, count in held)
    for each in held:
        spaces.give_back(*each, "a")
    assert spaces.may_take(64, "a")
    assert spaces.take(64, "a") == 0


def test_nobody_holds_more_than_half_but_at_once() -> None:
    spaces = Spaces(8)
    assert spaces.may_take(8, "a")
    first = spaces.take(3, "a")
    assert first == 0
    assert spaces.may_take(1, "a")
    assert not spaces.may_take(2, "a")
    assert spaces.may_take(5, "b")
    spaces.give_back(first, 3, "a")
    assert spaces.may_take(8, "a")


def test_what_is_freed_twice_is_noticed() -> None:
    spaces = Spaces(4)
    first = spaces.take(2, "a")
    assert first == 0
    spaces.give_back(first, 2, "a")
    with pytest.raises(AssertionError, match="freed twice"):
        spaces.give_back(first, 2, "a")


def test_pieces_of_runs_are_their_blocks_or_the_same_part_of_each() -> None:
    assert pieces_of([(5, 2), (1, 1)], 100, None).starts.tolist() == [500, 600, 100]
    part = pieces_of([(5, 0, 2)], 100, BlockPart(10, 30))
    assert (part.starts.tolist(), part.size, part.num_bytes) == ([510, 610], 30, 60)
    assert part.cut(1, 5).starts.tolist() == [610]


async def test_space_is_given_in_the_order_of_asking_and_after_a_cancelled_wait() -> None:
    pool = TwinPool(LAYOUT, 8)
    ring = StagingRing(pool, BLOCK, 8 * BLOCK)
    order: list[int] = []

    async def hold(size: int, until_set: asyncio.Event) -> None:
        async with ring.landing(pieces(size), size):
            order.append(size)
            await until_set.wait()

    free_first, free_rest = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(hold(6, free_first))
    await until(lambda: order == [6])
    large, small, given_up = (asyncio.create_task(hold(size, free_rest)) for size in (5, 1, 2))
    await until(lambda: len(ring._waiting) == 3)
    assert order == [6], "a small one does not overtake a large one"

    given_up.cancel()
    free_first.set()
    await until(lambda: order == [6, 5, 1])
    free_rest.set()
    await asyncio.gather(first, large, small)

    assert ring.num_free == ring.num_blocks
    await ring.close()
    assert pool.driver.pinned_bytes == 0


async def test_a_peer_that_holds_half_is_passed_over() -> None:
    ring = StagingRing(TwinPool(LAYOUT, 8), BLOCK, 8 * BLOCK)
    async with ring.landing(pieces(4), "stalled"):
        more = asyncio.create_task(ring.landing(pieces(1), "stalled").__aenter__())
        await until(lambda: len(ring._waiting) == 1)
        async with ring.landing(pieces(4), "other"):
            assert ring.num_free == 0
        assert not more.done()
        more.cancel()
    await until(lambda: ring.num_free == ring.num_blocks)
    await ring.close()


async def test_who_waits_at_the_close_is_told_and_who_holds_is_waited_for() -> None:
    ring = StagingRing(TwinPool(LAYOUT, 8), BLOCK, 8 * BLOCK)
    async with ring.landing(pieces(3), "a") as landing:
        waiting = asyncio.create_task(ring.landing(pieces(6), "b").__aenter__())
        await until(lambda: len(ring._waiting) == 1)
        closing = asyncio.create_task(ring.close())
        with pytest.raises(LostError, match="closed"):
            await waiting
        assert not closing.done()
        landing.views[0][:] = bytes([7]) * landing.views[0].nbytes
        await landing.land()
    await closing
    await ring.close()
    with pytest.raises(LostError, match="closed"):
        await ring.landing(pieces(1), "a").__aenter__()


async def test_a_part_keeps_its_place_in_blocks_that_a_peer_maps() -> None:
    content = random.Random(1).randbytes(8 * BLOCK)
    ring = StagingRing(TwinPool(LAYOUT, 8, content), BLOCK, 8 * BLOCK)
    part = BlockPart(100, 999)
    async with ring.copied([Run(6, 40, 2), Run(1, 42, 1)], part, ring.moment(), "a") as runs:
        assert list(runs) == [Run(0, 40, 2), Run(2, 42, 1)]
        staged = np.frombuffer(ring._view, dtype=np.uint8).reshape(-1, BLOCK)[:3, 100:1099]
        wanted = np.frombuffer(content, dtype=np.uint8).reshape(-1, BLOCK)[[6, 7, 1], 100:1099]
        assert np.array_equal(staged, wanted)
        del staged
    await ring.close()


async def test_more_at_once_than_there_is_staging_for_is_refused_with_a_reason() -> None:
    receive = ReceiveOptions(staging_bytes=8 * BLOCK)
    async with running_pair(SendOptions(kinds=("tcp",)), receive, (False, True)) as pair:
        with pytest.raises(RefusedError, match="of staging") as caught:
            await pair.pool.put(pair.reservation, whole(16))
        assert caught.value.refusal.reason is RefusalReason.INVALID
        await pair.pool.put(pair.reservation, whole(8))
        assert pair.target.content(0, 8) == pair.source.read_view(0, 8)


@pytest.mark.parametrize("kinds", [("tcp",), ("shm",)])
@pytest.mark.parametrize("broken", ["sender", "receiver"])
async def test_a_device_that_fails_loses_the_transfer_and_holds_nothing(
    kinds: tuple[str, ...], broken: str
) -> None:
    async with running_pair(SendOptions(kinds=kinds), devices=(True, True)) as pair:
        for side, pool in (("sender", pair.source), ("receiver", pair.target.pool)):
            assert isinstance(pool, TwinPool)
            pool.driver.is_broken = side == broken
        with pytest.raises(LostError):
            await pair.pool.put(pair.reservation, whole(NUM_BLOCKS))
        for ring in (pair.pool._staging, pair.server._state.staging):
            assert ring is not None
            await until(lambda ring=ring: ring.num_free == ring.num_blocks)  # type: ignore[misc]
        assert not any(ok for _, ok in pair.target.ended)


@pytest.mark.parametrize("kind", ["local", "shm", "tcp", "ipc"])
async def test_a_transfer_waits_for_the_steps_before_it_and_for_no_later_one(kind: str) -> None:
    send = SendOptions(kinds=(kind,), staging_bytes=8 * BLOCK)
    async with running_pair(send, devices=(True, True)) as pair:
        source, target = pair.source, pair.target.pool
        assert isinstance(source, TwinPool)
        assert isinstance(target, TwinPool)
        source.computed()
        before = source.driver.num_marks
        source.driver.awaited.clear()
        pair.target.on_grant = source.computed  # the next step is launched meanwhile

        await pair.pool.put(pair.reservation, whole(40))

        assert source.driver.num_marks > before
        assert set(source.driver.awaited) == {before}
        target.computed()
        target.driver.awaited.clear()
        await pair.pool.put(pair.reservation, whole(1))
        assert target.driver.awaited == [target.driver.num_marks]


class DeviceBlocks:
    """Gives the same eight blocks of a device pool away, as often as it is asked."""

    def begin_read(self, get: GetFrame) -> ReadGrant:
        return ReadGrant(get, (), pieces(8))

    def end_read(self, grant: ReadGrant) -> None:
        return


def test_one_of_a_group_that_takes_all_it_can_leaves_half_of_the_groups_half_to_others() -> None:
    spaces, slow, quick = Spaces(16), Within("readers", "slow"), Within("readers", "quick")
    taken = []
    while spaces.may_take(2, slow):
        taken.append(spaces.take(2, slow))
    assert taken == [0, 2]
    first = spaces.take(2, quick)
    assert first is not None
    assert spaces.may_take(2, quick)
    assert not spaces.may_take(3, quick), "half of the memory is not for readers"
    assert spaces.may_take(8, "a writer")
    spaces.give_back(first, 2, quick)
    for each in taken:
        assert each is not None
        spaces.give_back(each, 2, slow)
    assert spaces.num_free == 16
    assert spaces.may_take(8, slow), "what is more than its share goes alone"


async def test_readers_that_wait_for_a_budget_leave_half_to_what_arrives() -> None:
    budget = Pacer(10e6, SystemClock())
    budget.delay(1 << 50)  # the rest waits for years
    device, source = TwinPool(LAYOUT, NUM_BLOCKS), SourcePool()
    server = DataServer(
        RECEIVER,
        RecordingTarget(pool=device),
        ReceiveOptions(staging_bytes=16 * BLOCK, egress=budget),
        source=DeviceBlocks(),
        memory=device,
        hub=LocalHub(),
    )
    address, ring = await server.start(), server._state.staging
    assert ring is not None
    me, send = RECEIVER, SendOptions(kinds=("tcp",))
    lease = ReadLease(11, me.worker_id, me.incarnation, 1, b"secret", address.endpoint, None)
    readers = [
        BlockReader(ChannelIdentity(WorkerId(name), 1, LAYOUT), send, hub=LocalHub())
        for name in ("r0", "r1")
    ]
    pool = ChannelPool(SENDER, source, send, hub=LocalHub())
    into = [memoryview(bytearray(8 * BLOCK)) for _ in readers]
    reads = [
        asyncio.create_task(reader.get(lease, [BlockRun(0, 8)], [memory]))
        for reader, memory in zip(readers, into, strict=True)
    ]
    await until(lambda: ring.num_free == 0 or (ring.num_free == 8 and len(ring._waiting) == 1))

    await pool.put(reservation_at(address), whole(8))

    assert not any(read.done() for read in reads)
    for read in reads:
        read.cancel()
    for reader in readers:
        await reader.close()
    await pool.close()
    await server.close()
    source.close()
    device.close()


def test_copies_leave_room_to_reads() -> None:
    spaces = Spaces(16)
    copies = [owner_of(WorkerId(name), Share.COPY) for name in ("a", "b", "c")]
    assert spaces.may_take(4, copies[0])
    assert spaces.take(4, copies[0]) is not None
    assert not any(spaces.may_take(1, each) for each in copies)
    read = owner_of(WorkerId("a"), Share.READ)
    assert spaces.may_take(4, read)
    assert not spaces.may_take(5, read)
