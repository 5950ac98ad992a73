"""The prefix caches of all workers, without engines: who serves which reads, and what is found.

Compares one pool of segments (TokenLake 4) with caches per worker behind a cache-aware router.
Tests: tests/unit/sim/test_pool.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmesh.core.summary_statistics import coefficient_of_variation, mean
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.heavy_hitters import heavy_hitters, num_heavy_hitters
from kvmesh.policy.pool_eviction import plan_eviction
from kvmesh.policy.replication import choose_copy, plan_copies
from kvmesh.policy.segment_tree import Segment, SegmentTree
from kvmesh.policy.segments import segment_hashes, striped_homes
from kvmesh.sim.requests import block_hash
from kvmesh.sim.trace_request import TraceRequest

WINDOW_S = 30.0
"""Loads are compared, and copies planned, over windows of this length."""

FADE = 0.5
"""What a count keeps from one window to the next."""

EVICT_SHARE = 16
"""Evictions make room for one in so many of a worker's segments at once."""

ROUTER_THRESHOLD = 0.5
"""Share of a prompt that must be cached on a worker for the router to prefer it."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What is compared.

    Attributes:
        capacity: segments per worker.
        blocks: per segment.
        replicate: copy heavy hitters of overloaded workers.
        pooled: one pool; else every worker has a cache of its own.
    """

    num_workers: int
    capacity: int
    blocks: int = 2
    replicate: bool = True
    pooled: bool = True


@dataclass(slots=True)
class PoolResult:
    """What was found, and how evenly it was read.

    Attributes:
        cvs: coefficient of variation of reads per worker, window by window.
        chances: what it would be if each read fell on any worker alike.
        most_copies: of any segment at any time.
    """

    segments: int = 0
    hits: int = 0
    copies_made: int = 0
    most_copies: int = 1
    cvs: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of whole prompt segments that were cached."""
        return self.hits / self.segments if self.segments else 0.0

    @property
    def mean_cv(self) -> float:
        """Mean of the windows after the first, in which the pool is empty."""
        return mean(self.cvs[1:])

    @property
    def chance_cv(self) -> float:
        """As `mean_cv`, of reads that fall on workers by equal chances."""
        return mean(self.chances[1:])


def run_pool(requests: Iterable[TraceRequest], settings: PoolSettings, seed: int) -> PoolResult:
    """Replays the prompts of a trace against the caches."""
    pool = SegmentPool(settings, seed)
    for request in requests:
        pool.read(request)
    return pool.result


@dataclass(frozen=True, slots=True)
class Read:
    """One prompt's way through the caches.

    Attributes:
        holders: of the segments that were found, in order.
        stored: where the others were put.
        owner: the worker whose own cache it is; None for a pool.
    """

    holders: tuple[WorkerId, ...]
    stored: tuple[WorkerId, ...]
    owner: WorkerId | None


class SegmentPool:
    """One pool, or a cache for each worker.

    Args:
        seed: of the choice among copies.

    Attributes:
        workers: all of them.
    """

    def __init__(self, settings: PoolSettings, seed: int) -> None:
        self.result = PoolResult()
        self._settings = settings
        self._rng = random.Random(seed)
        self.workers = [WorkerId(f"w{index}") for index in range(settings.num_workers)]
        # Apart, a worker's cache is a tree of its own.
        trees = 1 if settings.pooled else settings.num_workers
        self._trees = [SegmentTree() for _ in range(trees)]
        self._held = dict.fromkeys(self.workers, 0)
        self._reads = dict.fromkeys(self.workers, 0.0)
        self._loads = dict.fromkeys(self.workers, 0.0)
        self._window_end = WINDOW_S

    def read(self, request: TraceRequest) -> Read:
        """One prompt: reads what is there, stores the rest."""
        while request.arrival_s >= self._window_end:
            self._end_window()
        hashes = [block_hash(each) for each in request.full_ids]
        names = segment_hashes(hashes, self._settings.blocks)
        self.result.segments += len(names)
        if self._settings.pooled:
            tree, owner = self._trees[0], None
        else:
            index = self._route(names)
            tree, owner = self._trees[index], self.workers[index]
        found = tree.match(names)
        self.result.hits += len(found)
        holders: list[WorkerId] = []
        for segment in found:
            copy = choose_copy(segment, self._loads, self._rng)
            assert copy is not None, "a segment in the tree has a copy"
            tree.read(segment, copy, request.arrival_s)
            self._reads[copy] += 1
            self._loads[copy] += 1
            holders.append(copy)
        if owner is not None:
            # A router knows what it has sent to a worker, not what was found there.
            self._loads[owner] += len(names) - len(found)
        stored = self._store(tree, owner, names, found, request.arrival_s)
        return Read(tuple(holders), tuple(stored), owner)

    def _route(self, names: tuple[BlockHash, ...]) -> int:
        """The longest prefix if it is long enough, else the least loaded worker."""
        matches = [len(tree.match(names)) for tree in self._trees]
        best = max(range(len(matches)), key=lambda index: matches[index])
        if names and matches[best] / len(names) > ROUTER_THRESHOLD:
            return best
        return min(range(len(matches)), key=lambda index: self._loads[self.workers[index]])

    def _store(
        self,
        tree: SegmentTree,
        owner: WorkerId | None,
        names: tuple[BlockHash, ...],
        found: list[Segment],
        now: float,
    ) -> list[WorkerId]:
        """Puts what was not found into the pool; returns where it went."""
        stored: list[WorkerId] = []
        pinned = set(names)
        parent = found[-1] if found else None
        for name, index in striped_homes(names, len(self.workers), len(found)):
            holder = owner or self.workers[index]
            if not self._make_room(tree, holder, pinned):
                break  # what follows could not be read without this one
            parent = tree.add(name, parent, holder, now)
            parent.accesses += 1
            self._held[holder] += 1
            stored.append(holder)
        return stored

    def _make_room(self, tree: SegmentTree, holder: WorkerId, pinned: set[BlockHash]) -> bool:
        if self._held[holder] < self._settings.capacity:
            return True
        count = max(self._settings.capacity // EVICT_SHARE, 1)
        for drop in plan_eviction(tree, holder, count, pinned):
            segment = tree.get(drop.segment)
            assert segment is not None, "evicted twice"
            tree.drop(segment, drop.holder)
            self._held[drop.holder] -= 1
        return self._held[holder] < self._settings.capacity

    def _end_window(self) -> None:
        if any(self._reads.values()):
            self.result.cvs.append(coefficient_of_variation([*self._reads.values()]))
            # Of a multinomial distribution over so many workers.
            total, others = sum(self._reads.values()), len(self.workers) - 1
            self.result.chances.append(math.sqrt(others / total))
        if self._settings.pooled and self._settings.replicate:
            self._copy_heavy_hitters()
        for tree in self._trees:
            tree.fade(FADE)
        self._loads = {worker: load * FADE for worker, load in self._loads.items()}
        self._reads = dict.fromkeys(self.workers, 0.0)
        self._window_end += WINDOW_S

    def _copy_heavy_hitters(self) -> None:
        tree = self._trees[0]
        hitters = heavy_hitters(tree, num_heavy_hitters(len(self.workers)))
        now = self._window_end
        for copy in plan_copies(hitters, self._loads):
            segment = tree.get(copy.segment)
            if segment is None or not self._make_room(tree, copy.target, {copy.segment}):
                continue
            # Making room may have dropped it, since it was not pinned elsewhere.
            if tree.get(copy.segment) is segment:
                tree.add(copy.segment, segment.parent, copy.target, now)
                self._held[copy.target] += 1
                self.result.copies_made += 1
                self.result.most_copies = max(self.result.most_copies, len(segment.copies))
