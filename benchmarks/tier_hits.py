"""How many prompt tokens of a trace a worker finds again, by the size of what lies below its pool.

The worker's own bookkeeping, block by block, without engines: pool, tiers and when copies are made.
Tests: tests/unit/benchmarks/test_tiers.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.tiers import EMPTY_SHARE, Tier, Tiers
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest

COPIED_AT_ONCE = 64


class TieredWorker:
    """A pool of blocks of a trace, and at most one tier below it.

    Args:
        places: of the tier; 0 without one.
    """

    def __init__(self, num_blocks: int, places: int) -> None:
        self._pool = BlockPool(num_blocks, TRACE_BLOCK)
        self._tiers: Tiers | None = None
        if places:
            self._tiers = Tiers([Tier("host", places)], self._pool.lost_below)
            self._pool.below = self._tiers

    def prompt(self, request: TraceRequest) -> int:
        """Computes what is cached nowhere; returns how many leading blocks were cached."""
        keys = [BlockHash(each.to_bytes(16, "big")) for each in request.full_ids]
        keys = keys[: self._pool.num_blocks]
        num_found = next((at for at, key in enumerate(keys) if not self._has(key)), len(keys))
        held = [block for key in keys if (block := self._pool.find(key)) is not None]
        self._pool.acquire(held)
        missing = [key for key in keys if self._pool.find(key) is None]
        if self._tiers is not None:
            for level, copies in self._tiers.begin_read(missing).items():
                for copy in copies:
                    self._tiers.end_read(level, copy, is_good=True)
        for block, key in zip(self._pool.allocate(len(missing)), missing, strict=True):
            self._pool.seal(block, key)
        blocks = [block for key in keys if (block := self._pool.find(key)) is not None]
        self._clean()
        self._pool.release(blocks)
        return num_found

    def _has(self, key: BlockHash) -> bool:
        below = self._tiers is not None and key in self._tiers
        return below or self._pool.find(key) is not None

    def _clean(self) -> None:
        """Copies as `TieredCache.clean` does, all of them before the next prompt."""
        pool, tiers = self._pool, self._tiers
        while tiers is not None and pool.num_empty < EMPTY_SHARE * pool.num_blocks:
            chosen = {each.key: each for each in pool.unsaved(COPIED_AT_ONCE)}
            pool.saving(list(chosen.values()))
            copies = tiers.begin_write(0, chosen)
            if not chosen:
                return
            for copy in copies:
                tiers.end_write(0, copy, is_good=True)


def hit_rate(
    requests: Sequence[TraceRequest], num_workers: int, num_blocks: int, places: int
) -> float:
    """Cached prompt tokens of all, full blocks alone; each session stays with one worker."""
    workers = [TieredWorker(num_blocks, places) for _ in range(num_workers)]
    homes: dict[str, int] = {}
    cached = total = 0
    for request in requests:
        home = homes.setdefault(request.session, len(homes) % num_workers)
        cached += workers[home].prompt(request) * TRACE_BLOCK
        total += request.input_tokens
    return cached / total
