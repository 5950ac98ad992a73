"""Memory for vLLM's cache, of a leader and of a rank that it hears from."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvmesh.core.errors import ConfigError
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.divided_pool import DividedPool
from kvmesh.engine.vllm_memory import CacheMemory, DeviceCache, FollowerCache, HostCache
from kvmesh.engine.vllm_messages import EngineRequest, pool_message, receive
from kvmesh.engine.vllm_ranks import Ranks
from tests.device_twin import TwinDriver, twin_driver
from tests.ranked_engine import BLOCK_SIZE, RankedRunner, rank_part

LAYOUT = RankedRunner(1).spec.layout
NUM_BLOCKS = 3
ALL_BYTES = (NUM_BLOCKS + 1) * LAYOUT.block_bytes


class FullDriver(TwinDriver):
    """A device without free memory."""

    def zeros(self, num_bytes: int) -> Tensor:
        """See `DeviceDriver.zeros`."""
        raise torch.OutOfMemoryError


class LostDriver(TwinDriver):
    """Tells of memory that nobody finds."""

    def export(self, memory: Tensor) -> tuple[bytes, int]:
        """See `DeviceDriver.export`."""
        handle, offset = super().export(memory)
        return bytes(len(handle)), offset


REQUEST = EngineRequest(Path("/model"), "float32", NUM_BLOCKS, BLOCK_SIZE, 0, 64, 8, device=0)


class OneMore(Ranks):
    """Rank 1 is the test itself, at the other end of a socket."""

    def __init__(self) -> None:
        super().__init__(REQUEST)
        ours, self.theirs = socket.socketpair()
        self._ends.append(ours)

    def close(self) -> None:
        """See `Ranks.close`."""
        self.theirs.close()
        super().close()


@pytest.fixture
def ranks() -> Iterator[OneMore]:
    made = OneMore()
    yield made
    made.close()


def test_one_rank_has_a_whole_pool_on_the_host_or_on_its_device() -> None:
    part = rank_part(0, 1, 1)
    on_host = HostCache(NUM_BLOCKS, None)
    on_host.allocate(ALL_BYTES)[LAYOUT.block_bytes] = 7
    assert bytes(on_host.pool(LAYOUT, part).read_view(1, 1))[0] == 7
    on_device = DeviceCache(REQUEST, None, twin_driver)
    on_device.allocate(ALL_BYTES)[LAYOUT.block_bytes] = 7
    pool = on_device.pool(LAYOUT, part)
    assert isinstance(pool, DeviceKvPool)
    assert bytes(pool.read_view(1, 1))[0] == 7
    assert on_host.is_shared
    assert not on_device.is_shared


def test_ranks_on_devices_keep_their_parts_and_the_leader_maps_them(ranks: OneMore) -> None:
    leader = DeviceCache(REQUEST, ranks, twin_driver)
    follower = FollowerCache(ranks.theirs, TwinDriver())
    assert not follower.is_shared
    memories = [each.allocate(ALL_BYTES // 2) for each in (leader, follower)]
    follower.tell_leader(rank_part(1, 2, 1), 4)
    pool = leader.pool(LAYOUT, rank_part(0, 2, 1))
    assert isinstance(pool, DividedPool)
    half = LAYOUT.block_bytes // 2
    memories[0][half], memories[1][half] = 5, 6
    view = pool.read_view(1, 1)
    assert (view[0], view[half]) == (5, 6)


def test_memory_of_a_rank_that_cannot_be_mapped_is_named(ranks: OneMore) -> None:
    leader = DeviceCache(REQUEST, ranks, twin_driver)
    leader.allocate(ALL_BYTES // 2)
    follower = FollowerCache(ranks.theirs, LostDriver())
    follower.allocate(ALL_BYTES // 2)
    follower.tell_leader(rank_part(1, 2, 1), 4)
    with pytest.raises(ConfigError, match="memory of rank 1 is out of reach"):
        leader.pool(LAYOUT, rank_part(0, 2, 1))


def test_a_rank_waits_for_the_leader_before_it_allocates(ranks: OneMore) -> None:
    """The leader has found no fault in the model by then, and is the only one to name one."""
    follower = FollowerCache(ranks.theirs, FullDriver())
    ranks.close()
    with pytest.raises((EOFError, OSError)):
        follower.allocate(ALL_BYTES)


def test_a_device_without_memory_is_named(ranks: OneMore) -> None:
    full: list[CacheMemory] = [
        DeviceCache(REQUEST, None, lambda _: FullDriver()),
        FollowerCache(ranks.theirs, FullDriver()),
    ]
    ranks.tell(pool_message(0))
    for each in full:
        with pytest.raises(ConfigError, match=r"KV blocks take 1\.00 GiB.*: use fewer blocks"):
            each.allocate(1 << 30)


def test_a_host_without_memory_is_named() -> None:
    with pytest.raises(ConfigError, match="use fewer blocks"):
        HostCache(NUM_BLOCKS, None).allocate(1 << 50)


def test_a_follower_on_the_host_tells_nothing(ranks: OneMore) -> None:
    follower = FollowerCache(ranks.theirs, None)
    follower.tell_leader(rank_part(1, 2, 1), 4)
    ranks.theirs.sendall(b"\2\0\0\0{}")
    assert receive(ranks._ends[0]) == {}
