"""Host memory and disk below a simulated worker's pool: the live bookkeeping with modelled speeds.

Copies to a lower tier take no time, because workers make them beside their steps. Blocks are loaded
at the tier's speed, before their prompt is computed.
Tests: tests/unit/sim/test_tiers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from kvmesh.core.block_names import DISK, HOST
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.tiers import EMPTY_SHARE, Tier, Tiers, at_once
from kvmesh.policy.prefix_source import Way, cheapest_way

_COPIED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Tiers of every worker.

    Attributes:
        host_blocks, disk_blocks: sizes in blocks of 512 tokens as in traces; 0: no such tier.
        host_bytes_per_s, disk_bytes_per_s: speeds of loading KV.
    """

    host_blocks: int = 0
    disk_blocks: int = 0
    host_bytes_per_s: float = 25e9
    disk_bytes_per_s: float = 6e9

    @property
    def speeds(self) -> dict[str, float]:
        """By name of each existing tier, the fastest first."""
        sizes = {HOST: (self.host_blocks, self.host_bytes_per_s)}
        sizes[DISK] = (self.disk_blocks, self.disk_bytes_per_s)
        return {name: speed for name, (num_blocks, speed) in sizes.items() if num_blocks}


class SimTiers:
    """The tiers below one new pool.

    Args:
        block_bytes: mean bytes of a block.

    Attributes:
        loaded_blocks: number of blocks loaded since the start.
    """

    def __init__(self, pool: BlockPool, sizes: TierSizes, block_bytes: float) -> None:
        self._pool = pool
        places = {HOST: sizes.host_blocks, DISK: sizes.disk_blocks}
        self._tiers = Tiers([Tier(name, places[name]) for name in sizes.speeds], pool.lost_below)
        self._block_s = [block_bytes / speed for speed in sizes.speeds.values()]
        self.loaded_blocks = 0
        pool.below = self._tiers
        pool.on_unsaved = self._clean

    def block_s(self, tier: str) -> float:
        """Returns the seconds to load a block from a tier; 0 if no tier has this name."""
        for level, seconds in enumerate(self._block_s):
            if self._tiers[level].name == tier:
                return seconds
        return 0.0

    def reach(self, hashes: Sequence[BlockHash], num_held: int) -> int:
        """Returns the leading blocks in pool or tiers; the first `num_held` are in the pool."""
        find, tiers = self._pool.find, self._tiers
        further = islice(hashes, num_held, None)
        here = takewhile(lambda key: find(key) is not None or key in tiers, further)
        return num_held + sum(1 for _ in here)

    def load_s(self, hashes: Sequence[BlockHash]) -> float:
        """Returns the seconds to load those of these blocks that are in tiers."""
        lower = (self._tiers.find(key) for key in hashes if self._pool.find(key) is None)
        return sum(self._block_s[level] for level in lower if level is not None)

    def pays(self, hashes: Sequence[BlockHash], compute_s: float) -> bool:
        """Whether blocks are loaded faster than they are computed, as workers decide it."""
        return cheapest_way(compute_s, None, None, self.load_s(hashes))[0] is Way.LOAD

    def take(self, hashes: Sequence[BlockHash]) -> None:
        """Counts blocks as used, because they are being loaded."""
        missing = [key for key in hashes if self._pool.find(key) is None]
        for level, copies in self._tiers.begin_read(missing).items():
            self.loaded_blocks += len(copies)
            for copy in copies:
                self._tiers.end_read(level, copy, is_good=True)

    def bring_up(self, hashes: Sequence[BlockHash]) -> float:
        """Loads leading blocks to be lent, as many as fit; returns the seconds that it takes."""
        pool = self._pool
        wanted = hashes[: at_once(self.reach(hashes, 0), pool.num_free)]
        missing = [key for key in wanted if pool.find(key) is None]
        here = [block for key in wanted if (block := pool.find(key)) is not None]
        pool.acquire(here)
        seconds = 0.0
        if 0 < len(missing) <= pool.num_free:
            seconds = self.load_s(missing)
            self.take(missing)
            fresh = pool.allocate(len(missing))
            for block, key in zip(fresh, missing, strict=True):
                pool.seal(block, key)
            pool.release(fresh)
        pool.release(here)
        return seconds

    def _clean(self) -> None:
        """Copies the next evictions to a lower tier, as `TieredCache` does."""
        pool, tiers = self._pool, self._tiers
        while pool.num_empty < EMPTY_SHARE * pool.num_blocks:
            chosen = {each.key: each for each in pool.unsaved(_COPIED_AT_ONCE)}
            for copy in tiers.begin_write(0, chosen, may_lose=False):
                tiers.end_write(0, copy, is_good=True)
            known = [each for key, each in chosen.items() if tiers[0].knows(key)]
            pool.saving(known)
            self._clean_host()
            if not known:
                return

    def _clean_host(self) -> None:
        """Copies from host memory to disk, as `TieredCache` does."""
        host = self._tiers[0]
        while len(self._tiers) > 1 and host.num_free < EMPTY_SHARE * host.num_places:
            copies = self._tiers.begin_write(1, host.unsaved(_COPIED_AT_ONCE))
            if not copies:
                return
            for copy in copies:
                self._tiers.end_write(1, copy, is_good=True)
