"""Devices that read each other's pools: when they do, when they do not, and what they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.core.errors import LostError
from kvmesh.engine.device_pool import MappedPeer
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.device import HANDLE_BYTES, SharedMemory
from kvmesh.transfer.frames import SegmentOffer
from kvmesh.transfer.ipc_channel import ENGINE, memory_of, segment_of
from kvmesh.transfer.nixl_process import EngineError
from tests.device_peers import NUM_BLOCKS, check_blocks_come_over, other_process
from tests.device_twin import TwinPool
from tests.transfer_pair import BLOCK, DECODE, LAYOUT, running_pair, until, whole

MEMORY = SharedMemory(bytes(range(HANDLE_BYTES)), 512, 10 * BLOCK)
NEAREST = SendOptions(kinds=("ipc", "shm", "tcp"))


@pytest.mark.parametrize(
    ("devices", "kind"),
    [
        ((True, True), "ipc"),
        ((True, False), "shm"),
        ((False, True), "shm"),
        ((False, False), "shm"),
    ],
)
async def test_it_is_taken_where_both_pools_are_on_devices(
    devices: tuple[bool, bool], kind: str
) -> None:
    async with running_pair(NEAREST, devices=devices) as pair:
        await pair.pool.put(pair.reservation, whole(20))
        assert pair.target.content(0, 20) == pair.source.read_view(0, 20)
        assert set(pair.pool.statistics().links) == {(DECODE, kind, "sent")} | (
            {(DECODE, "ipc", "sent")} if devices[0] else set()
        )
        assert pair.pool.statistics().links[DECODE, kind, "sent"].bytes == 20 * BLOCK  # type: ignore[index]


async def test_memory_that_cannot_be_shared_goes_another_way() -> None:
    async with running_pair(NEAREST, devices=(True, True)) as pair:
        assert isinstance(pair.source, TwinPool)
        pair.source.driver.is_private = True
        await pair.pool.put(pair.reservation, whole(20))
        assert pair.target.content(0, 20) == pair.source.read_view(0, 20)
        assert pair.pool.statistics().links[DECODE, "shm", "sent"].bytes == 20 * BLOCK  # type: ignore[index]


async def test_a_peer_that_maps_and_cannot_copy_gets_another_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def out_of_reach(*_: object) -> None:
        raise LostError("no access between these devices")

    monkeypatch.setattr(MappedPeer, "copy", out_of_reach)
    async with running_pair(NEAREST, devices=(True, True)) as pair:
        with pytest.raises(LostError):
            await pair.pool.put(pair.reservation, whole(20))
        await until(lambda: bool(pair.target.lost))
        assert not any(ok for _, ok in pair.target.ended)

        await pair.pool.put(pair.reservation, whole(20))

        assert pair.target.content(0, 20) == pair.source.read_view(0, 20)
        assert pair.pool.statistics().links[DECODE, "shm", "sent"].bytes == 20 * BLOCK  # type: ignore[index]


async def test_a_mapping_ends_with_its_connection() -> None:
    async with running_pair(NEAREST, devices=(True, True)) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        receiver = pair.target.pool
        assert isinstance(receiver, TwinPool)
        assert receiver.driver.num_open == 1
        await pair.pool.close()
        await until(lambda: receiver.driver.num_open == 0)


def test_memory_in_a_greeting_is_read_as_it_was_written() -> None:
    assert memory_of(segment_of(MEMORY), 10 * BLOCK) == MEMORY


@pytest.mark.parametrize(
    ("metadata", "num_bytes", "match"),
    [
        (b"", 10 * BLOCK, "name no device memory"),
        (segment_of(MEMORY).metadata[:-1], 10 * BLOCK, "name no device memory"),
        (segment_of(MEMORY).metadata + b"\0", 10 * BLOCK, "name no device memory"),
        (b"\7" + segment_of(MEMORY).metadata[1:], 10 * BLOCK, "version 7"),
        (segment_of(MEMORY).metadata, 11 * BLOCK, "for a pool of"),
    ],
)
def test_what_names_no_such_memory_is_refused(metadata: bytes, num_bytes: int, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        memory_of(SegmentOffer(ENGINE, 0, metadata), num_bytes)


def test_memory_beyond_any_address_is_refused() -> None:
    segment = segment_of(MEMORY)
    with pytest.raises(EngineError, match="no allocation reaches"):
        memory_of(replace(segment, address=2**64 - 1), 10 * BLOCK)


async def test_a_greeting_that_names_memory_that_is_not_there_is_refused() -> None:
    pool = TwinPool(LAYOUT, 2)
    nowhere = SharedMemory(bytes(HANDLE_BYTES), 0, 2 * BLOCK)
    with pytest.raises(LostError, match="no such memory"):
        pool.map_peer(nowhere)
    too_much = pool.share()._replace(num_bytes=1 << 40)
    with pytest.raises(LostError, match="smaller than announced"):
        pool.map_peer(too_much)
    assert pool.driver.num_open == 0


def test_blocks_of_another_process_come_over_and_stay_when_it_dies() -> None:
    pool = TwinPool(LAYOUT, NUM_BLOCKS)
    with other_process("twin") as (memory, child):
        check_blocks_come_over(pool, memory)
        peer = pool.map_peer(memory)
        child.kill()
        child.wait()
        peer.close()
        with pytest.raises(LostError, match="no such memory"):
            pool.map_peer(memory)
    assert pool.driver.num_open == 0
