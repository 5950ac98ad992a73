"""Who holds which blocks, kept from the workers' block events as the kvmanager does.

Tests: tests/unit/sim/test_prefix_index.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.kv.block_pool import BlockPool


class PrefixIndex:
    """Holders by block hash."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, set[WorkerId]] = {}
        self._pools: dict[WorkerId, BlockPool] = {}
        self._changed: set[WorkerId] = set()

    def add(self, worker_id: WorkerId, pool: BlockPool) -> None:
        """Follows a worker's pool; it is new and empty."""
        self._pools[worker_id] = pool

    def remove(self, worker_id: WorkerId) -> None:
        """Forgets a worker that is gone."""
        self._take_events(worker_id)
        for block_hash in self._pools.pop(worker_id).held_hashes():
            self._discard(block_hash, worker_id)

    def note_change(self, worker_id: WorkerId) -> None:
        """The worker's pool may have events."""
        self._changed.add(worker_id)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Leading blocks held by each worker; those that hold none are left out."""
        for worker_id in self._changed:
            self._take_events(worker_id)
        self._changed.clear()
        matches: dict[WorkerId, int] = {}
        left: set[WorkerId] = set()
        for index, block_hash in enumerate(hashes):
            holders = self._holders.get(block_hash)
            if holders is None:
                break
            stay = left & holders if index else holders
            if len(stay) < len(left):
                matches.update(dict.fromkeys(left - stay, index))
            left = stay
            if not left:
                return matches
        else:
            index = len(hashes)
        matches.update(dict.fromkeys(left, index))
        return matches

    def _take_events(self, worker_id: WorkerId) -> None:
        pool = self._pools.get(worker_id)
        if pool is None or not pool.has_events:
            return
        events = pool.take_events()
        for block_hash in events.stored:
            self._holders.setdefault(block_hash, set()).add(worker_id)
        for block_hash in events.removed:
            self._discard(block_hash, worker_id)

    def _discard(self, block_hash: BlockHash, worker_id: WorkerId) -> None:
        holders = self._holders.get(block_hash)
        if holders is not None:
            holders.discard(worker_id)
            if not holders:
                del self._holders[block_hash]
