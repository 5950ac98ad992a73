"""Index of the workers that hold each block, built from their block events as in the kvmanager.

Tests: tests/unit/sim/test_prefix_index.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmesh.core.block_names import TELLS_TIERS, in_disk, in_host
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.kv.block_pool import BlockPool
from kvmesh.policy.holders import Holders
from kvmesh.policy.slot_index import levels_of


class PrefixIndex:
    """Holders by block hash; a set of workers is an integer with one bit per worker."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        self._pools: dict[WorkerId, BlockPool] = {}
        self._changed: set[WorkerId] = set()
        self._names: list[WorkerId] = []
        self._places: dict[WorkerId, int] = {}

    def add(self, worker_id: WorkerId, pool: BlockPool) -> None:
        """Adds a worker with a new, empty pool."""
        self._pools[worker_id] = pool

    def remove(self, worker_id: WorkerId) -> None:
        """Removes a worker that is gone."""
        self._take_events(worker_id)
        for block_hash in self._pools.pop(worker_id).told_names():
            self._discard(block_hash, 1 << self._places[worker_id])

    def note_change(self, worker_id: WorkerId) -> None:
        """Records that the worker's pool may have events."""
        self._changed.add(worker_id)

    def match(self, hashes: Sequence[BlockHash]) -> Holders:
        """Returns the number of leading blocks that each worker holds, without zeros."""
        self._take_changes()
        levels: list[tuple[int, int]] = []
        left = 0
        for index, block_hash in enumerate(hashes):
            holders = self._holders.get(block_hash, 0)
            stay = left & holders if index else holders
            if stay != left:
                if left:
                    levels.append((index, left ^ stay))
                left = stay
            if not left:
                break
        if left:
            levels.append((len(hashes), left))
        levels.reverse()
        if not levels or not self._holders.get(TELLS_TIERS):
            return Holders(self._names, self._places, levels)
        get, most, everyone = self._holders.get, levels[0][0], (1 << len(self._names)) - 1

        def in_memory(at: int) -> int:
            return get(hashes[at], 0) & ~get(in_disk(hashes[at]), 0)

        def in_pool(at: int) -> int:
            return in_memory(at) & ~get(in_host(hashes[at]), 0)

        return Holders(
            self._names,
            self._places,
            levels,
            levels_of(in_pool, most, everyone),
            levels_of(in_memory, most, everyone),
        )

    def holders(
        self, workers: Iterable[WorkerId], hashes: Iterable[BlockHash]
    ) -> dict[WorkerId, set[BlockHash]]:
        """Returns which of these blocks each of these workers holds, in any tier."""
        self._take_changes()
        bits = {name: 1 << self._places[name] for name in workers if name in self._places}
        sets = {key: self._holders.get(key, 0) for key in hashes}
        return {
            name: {key for key, held in sets.items() if held & bit} for name, bit in bits.items()
        }

    def _take_changes(self) -> None:
        for worker_id in self._changed:
            self._take_events(worker_id)
        self._changed.clear()

    def _take_events(self, worker_id: WorkerId) -> None:
        pool = self._pools.get(worker_id)
        if pool is None or not pool.has_events:
            return
        if worker_id not in self._places:
            self._place_all()
        bit = 1 << self._places[worker_id]
        events = pool.take_events()
        for block_hash in events.stored:
            self._holders[block_hash] = self._holders.get(block_hash, 0) | bit
        for block_hash in events.removed:
            self._discard(block_hash, bit)

    def _place_all(self) -> None:
        """Assigns every worker's bit by name order, and moves the bits in all sets."""
        before = self._names
        self._names = sorted({*before, *self._pools})
        self._places = {name: place for place, name in enumerate(self._names)}
        if before == self._names[: len(before)]:
            return
        for block_hash, workers in self._holders.items():
            self._holders[block_hash] = sum(
                1 << self._places[name] for place, name in enumerate(before) if workers >> place & 1
            )

    def _discard(self, block_hash: BlockHash, bit: int) -> None:
        left = self._holders.get(block_hash, 0) & ~bit
        if left:
            self._holders[block_hash] = left
        else:
            self._holders.pop(block_hash, None)
