"""Prefixes that do not fit the pool: copied to tiers before eviction, and back before a prompt.

The copies are made outside of the event loop and the steps, by the copier of preempted sequences.
Tests: tests/unit/engine/test_tiered_cache.py, tests/integration/test_tiers.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvmesh.core.clock import Clock
from kvmesh.core.types import BlockHash
from kvmesh.engine.disk_store import DiskStore
from kvmesh.engine.outside_cache import OutsideCache
from kvmesh.engine.prefix_fill import PrefixFill, PrefixFills
from kvmesh.engine.tier_stores import Good, TierStore
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.lower_copies import UnsavedBlock
from kvmesh.kv.tiers import EMPTY_SHARE, Copy, Tier, Tiers, TierStatistics, is_nearly_full
from kvmesh.policy.linear_time import LinearTime
from kvmesh.policy.prefix_source import Way, cheapest_way
from kvmesh.policy.prompt_time import PromptTime


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load.

    Attributes:
        num_blocks: number of leading blocks of the prefix that are in the pool now.
        num_loaded: number of blocks by which this exceeds the state before the load.
    """

    num_blocks: int
    num_loaded: int
    seconds: float


class _Load:
    """A prefix that is being brought up."""

    def __init__(self, fill: PrefixFill, done: Callable[[LoadResult], None], now: float) -> None:
        self.fill = fill
        self.done = done
        self.started = now
        self.before = fill.num_held
        self.num_open = 0
        self.keys: list[BlockHash] = []
        self.here: list[int] = []
        self.good: set[BlockHash] = set()


class TieredCache:
    """The tiers below one pool, with their bytes.

    Args:
        stores: stores of the tiers, the fastest first.
        prompt_time: to compute a prefix instead of loading it.
        clock: measures the durations of loads.
        spill: store of the second tier, if the first one is host memory and has a tier below.
    """

    def __init__(
        self,
        pool: BlockPool,
        fills: PrefixFills,
        tiers: Sequence[Tier],
        stores: Sequence[TierStore],
        prompt_time: PromptTime,
        clock: Clock,
        spill: DiskStore | None = None,
    ) -> None:
        assert pool.is_idle, "no block was taken yet"
        self._pool = pool
        self._fills = fills
        self._stores = tuple(stores)
        self._prompt_time = prompt_time
        self._clock = clock
        self._tiers = Tiers(tiers, pool.lost_below)
        self._spill = spill
        self._is_saving = self._is_spilling = False
        self._num_loads = 0
        self._speeds: list[LinearTime | None] = [None] * len(stores)  # None: not measured yet
        self.outside: OutsideCache | None = None
        """The store below the tiers, if the first tier is host memory and there is one."""
        pool.below = self._tiers
        pool.on_unsaved = self.clean

    # --- down --------------------------------------------------------------------------------

    def clean(self) -> None:
        """Starts to copy the blocks that would be lost soonest, if the pool is about to evict."""
        pool = self._pool
        if self._is_saving or pool.num_empty >= EMPTY_SHARE * pool.num_blocks:
            return
        copies: list[Copy] = []
        while not copies:
            chosen = {each.key: each for each in pool.unsaved(self._stores[0].num_at_once)}
            copies = self._tiers.begin_write(0, chosen, may_lose=not self._can_wait)
            # Some of these blocks left the pool and returned while their copy was made.
            known = [each for key, each in chosen.items() if self._tiers[0].knows(key)]
            pool.saving(known)
            if not known:
                return
        blocks = [chosen[copy.key] for copy in copies]
        self._is_saving = True
        self._stores[0].save(
            [each.block for each in blocks],
            copies,
            lambda: [pool.is_same(each) for each in blocks],
            partial(self._saved, blocks, copies),
        )

    @property
    def _can_wait(self) -> bool:
        """Whether host memory has room soon, and the pool has until then."""
        pool = self._pool
        return self._is_spilling and not is_nearly_full(pool.num_safe, pool.num_blocks)

    def _saved(self, blocks: Sequence[UnsavedBlock], copies: Sequence[Copy], good: Good) -> None:
        self._is_saving = False
        for copy, is_good in zip(copies, good, strict=True):
            self._tiers.end_write(0, copy, is_good=is_good)
        if self.outside is not None:
            kept = zip(copies, good, strict=True)
            self.outside.offer(copy.key for copy, is_good in kept if is_good)
        self._clean_host()
        self.clean()

    def _clean_host(self) -> None:
        """Copies from host memory to disk, by the same rule as `clean`."""
        host = self._tiers[0]
        if self._spill is None or self._is_spilling:
            return
        if host.num_free >= EMPTY_SHARE * host.num_places:
            return
        copies = self._tiers.begin_write(1, host.unsaved(self._spill.num_at_once))
        if not copies:
            return
        self._is_spilling = True
        sources = [host.begin_read(copy.key) for copy in copies]
        places = [source.place for source in sources]
        self._spill.spill(places, copies, partial(self._spilled, sources, copies))

    def _spilled(self, sources: Sequence[Copy], copies: Sequence[Copy], good: Good) -> None:
        self._is_spilling = False
        for source, copy, is_good in zip(sources, copies, good, strict=True):
            self._tiers.end_spill(source, copy, is_good=is_good)
        self._clean_host()
        self.clean()

    # --- up ----------------------------------------------------------------------------------

    def compute_s(self, num_blocks: int) -> float:
        """Returns the estimated seconds to compute so many blocks of a prompt; 0 if unknown."""
        return self._prompt_time.of(num_blocks * self._pool.block_size)

    def pays(self, hashes: Sequence[BlockHash], num_held: int) -> bool:
        """Returns whether bringing up more of a prefix makes the first token come sooner.

        Args:
            hashes: hashes of the blocks that may come from a cache, from the first one on.
            num_held: number of leading blocks that the pool has.
        """
        length = self._fills.rooms.resumable(hashes)
        if length <= num_held:
            return False
        load_s = self._load_s(self._fills.rooms.missing(hashes, num_held, length))
        compute_s = self.compute_s(length - num_held)
        if not compute_s or cheapest_way(compute_s, None, None, load_s)[0] is Way.LOAD:
            return True
        # Otherwise one slow load would decide forever: its weight fades until one is tried again.
        self._speeds = [None if each is None else each.without_call() for each in self._speeds]
        return False

    def token_s(self, tier: str) -> float:
        """Returns the measured seconds to bring up a token's KV from the named tier; 0 if unknown.

        In a model with several groups more than one block holds the KV of a token. Loading then
        costs a little more than this, which does no harm in routing.
        """
        for level, speed in enumerate(self._speeds):
            if speed is not None and self._tiers[level].name == tier:
                return speed.unit_s / self._pool.block_size
        return 0.0

    def _load_s(self, keys: Sequence[BlockHash]) -> float:
        """Returns the estimated seconds to load blocks, as far as measured."""
        num_blocks = Counter(self._tiers.find(key) for key in keys if self._pool.find(key) is None)
        return sum(
            speed.estimate_s(1, num_blocks[level])
            for level, speed in enumerate(self._speeds)
            if speed is not None and num_blocks[level]
        )

    def load(self, fill: PrefixFill, done: Callable[[LoadResult], None]) -> None:
        """Brings up the part of a prefix that lies in lower tiers.

        Args:
            fill: ended here in all cases.
            done: called once; by then nothing writes into the blocks.
        """
        load = _Load(fill, done, self._clock.now())
        self._num_loads += 1
        fill.adopt()
        held, length = fill.num_held, self._fills.rooms.resumable(fill.hashes)
        if length <= held:
            self._end(load)
            return
        load.keys = self._fills.rooms.missing(fill.hashes, held, length)
        found = {key: self._pool.find(key) for key in load.keys}
        here = {key: block for key, block in found.items() if block is not None}
        # Cached blocks after a gap are kept; they will replace the room made for them.
        load.here, load.good = list(here.values()), set(here)
        self._pool.acquire(load.here)
        blocks = fill.open(length)
        if blocks is None:
            self._pool.release(load.here)
            self._end(load)
            return
        target = dict(zip(load.keys, blocks, strict=True))
        reads = self._tiers.begin_read(key for key in load.keys if key not in here)
        load.num_open = len(reads)
        for level, copies in reads.items():
            places = [copy.place for copy in copies]
            into = [target[copy.key] for copy in copies]
            loaded = partial(self._loaded, load, level, copies, self._clock.now())
            self._stores[level].load(places, into, loaded)
        if not reads:  # the blocks came into the pool meanwhile
            self._close(load)

    def _loaded(
        self, load: _Load, level: int, copies: Sequence[Copy], began: float, good: Good
    ) -> None:
        speed = self._speeds[level] or self._stores[level].first_speed
        self._speeds[level] = speed.with_sample(len(copies), self._clock.now() - began)
        for copy, is_good in zip(copies, good, strict=True):
            self._tiers.end_read(level, copy, is_good=is_good)
            if is_good:
                load.good.add(copy.key)
        load.num_open -= 1
        if not load.num_open:
            self._close(load)

    def _close(self, load: _Load) -> None:
        filled = next((i for i, key in enumerate(load.keys) if key not in load.good), None)
        load.fill.close(len(load.keys) if filled is None else filled)
        self._pool.release(load.here)
        self._end(load)

    def _end(self, load: _Load) -> None:
        now_here = load.fill.num_held
        load.fill.end()
        self._num_loads -= 1
        seconds = self._clock.now() - load.started
        load.done(LoadResult(now_here, now_here - load.before, seconds))

    # --- state -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way, up or down."""
        is_outside_idle = self.outside is None or self.outside.is_idle
        return is_outside_idle and not (self._num_loads or self._is_saving or self._is_spilling)

    @property
    def below(self) -> Tiers:
        """The records of what lies where."""
        return self._tiers

    def statistics(self) -> list[TierStatistics]:
        """Returns the statistics of each tier, the fastest first."""
        outside = [] if self.outside is None else [self.outside.statistics()]
        return self._tiers.statistics() + outside

    def close(self) -> None:
        """Frees memory and files; no copy may be under way."""
        for store in self._stores:
            store.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when the records contradict each other."""
        self._tiers.check_integrity()
