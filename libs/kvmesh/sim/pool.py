"""Simulates the prefix caches of all workers without engines: hits, reads per worker and copies.

Compares one pool of segments (TokenLake 4) with caches per worker behind a cache-aware router,
without copies and with those that the kvmanager orders.
Tests: tests/unit/sim/test_pool.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvmesh.core.pool import PoolMember, PoolReport
from kvmesh.core.summary_statistics import coefficient_of_variation, mean
from kvmesh.core.types import BlockHash, Endpoint, Role, WorkerId
from kvmesh.kv.hashing import split_hashes
from kvmesh.policy.heat import FADE, MAX_SEGMENTS, HeatTable
from kvmesh.policy.heavy_hitters import heavy_hitters, num_heavy_hitters
from kvmesh.policy.hot_runs import MAX_HOT_SEGMENTS, MIN_READS, hot_runs
from kvmesh.policy.pool_eviction import plan_eviction
from kvmesh.policy.pool_plan import CopyLimits, PoolPlacement, plan_prefix_copies
from kvmesh.policy.replication import choose_copy, plan_copies
from kvmesh.policy.segment_tree import Segment, SegmentTree
from kvmesh.policy.segments import segment_hashes, striped_homes
from kvmesh.sim.requests import block_hash
from kvmesh.sim.trace_request import TraceRequest

WINDOW_S = 30.0
"""Seconds of the windows over which loads are compared and copies planned."""

EVICT_SHARE = 16
"""Ratio of a worker's segments to those that one eviction frees."""

ROUTER_THRESHOLD = 0.5
"""Fraction of a prompt that must be cached on a worker for the router to prefer it."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of one run.

    Attributes:
        capacity: number of segments that a worker can hold.
        blocks: number of blocks per segment.
        replicate: whether heavy hitters of overloaded workers are copied; whole prefixes, by the
            kvmanager's plan, if every worker has its own cache.
        pooled: whether there is one pool of segments; else every worker has its own cache.
        placement: where the kvmanager's plan places prefixes.
    """

    num_workers: int
    capacity: int
    blocks: int = 2
    replicate: bool = True
    pooled: bool = True
    placement: PoolPlacement = PoolPlacement.LOCAL


@dataclass(slots=True)
class PoolResult:
    """Hits of one run, and the evenness of its reads.

    Attributes:
        cvs: coefficient of variation of reads per worker in each window.
        chances: its value in each window if each read went to a random worker.
        most_copies: largest number of copies of any segment at any time.
    """

    segments: int = 0
    hits: int = 0
    copies_made: int = 0
    most_copies: int = 1
    cvs: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Fraction of whole prompt segments that were cached."""
        return self.hits / self.segments if self.segments else 0.0

    @property
    def mean_cv(self) -> float:
        """Mean of `cvs` without the first window, in which the pool is empty."""
        return mean(self.cvs[1:])

    @property
    def chance_cv(self) -> float:
        """Mean of `chances` without the first window."""
        return mean(self.chances[1:])


def run_pool(requests: Iterable[TraceRequest], settings: PoolSettings, seed: int) -> PoolResult:
    """Replays the prompts of a trace against the caches."""
    pool = SegmentPool(settings, seed)
    for request in requests:
        pool.read(request)
    return pool.result


@dataclass(frozen=True, slots=True)
class Read:
    """Result of reading one prompt from the caches.

    Attributes:
        holders: worker that each found segment was read from, in order.
        stored: worker that each missing segment was stored on.
        owner: the worker whose own cache was read; None for a pool.
    """

    holders: tuple[WorkerId, ...]
    stored: tuple[WorkerId, ...]
    owner: WorkerId | None


class SegmentPool:
    """One pool, or a cache for each worker.

    Args:
        seed: of the random choice among copies.

    Attributes:
        workers: names of all workers.
    """

    def __init__(self, settings: PoolSettings, seed: int) -> None:
        self.result = PoolResult()
        self._settings = settings
        self._rng = random.Random(seed)
        self.workers = [WorkerId(f"w{index}") for index in range(settings.num_workers)]
        # Without a pool each worker's cache is a separate tree.
        trees = 1 if settings.pooled else settings.num_workers
        self._trees = [SegmentTree() for _ in range(trees)]
        self._held = dict.fromkeys(self.workers, 0)
        self._reads = dict.fromkeys(self.workers, 0.0)
        self._loads = dict.fromkeys(self.workers, 0.0)
        self._window_end = WINDOW_S
        # A kvmanager's knowledge of caches: reads of prefixes, and of workers.
        self._heat = HeatTable(settings.blocks, MAX_SEGMENTS)
        self._read_lately = dict.fromkeys(self.workers, 0.0)

    def read(self, request: TraceRequest) -> Read:
        """Reads the cached segments of a prompt and stores the rest."""
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
        if owner is not None and self._settings.replicate:
            self._heat.note(b"".join(hashes[: len(found) * self._settings.blocks]))
        holders: list[WorkerId] = []
        for segment in found:
            copy = choose_copy(segment, self._loads, self._rng)
            assert copy is not None, "a segment in the tree has a copy"
            tree.read(segment, copy, request.arrival_s)
            self._reads[copy] += 1
            self._read_lately[copy] += self._settings.blocks
            self._loads[copy] += 1
            holders.append(copy)
        if owner is not None:
            # A router knows the prompts that it sent to a worker, not the hits there.
            self._loads[owner] += len(names) - len(found)
        stored = self._store(tree, owner, names, found, request.arrival_s)
        return Read(tuple(holders), tuple(stored), owner)

    def _route(self, names: tuple[BlockHash, ...]) -> int:
        """Returns the worker with the longest prefix if it is long enough, else the least
        loaded; the less loaded one of equals.
        """
        matches = [len(tree.match(names)) for tree in self._trees]
        loads = [self._loads[worker] for worker in self.workers]
        best = max(range(len(matches)), key=lambda index: (matches[index], -loads[index]))
        if names and matches[best] / len(names) > ROUTER_THRESHOLD:
            return best
        return min(range(len(matches)), key=loads.__getitem__)

    def _store(
        self,
        tree: SegmentTree,
        owner: WorkerId | None,
        names: tuple[BlockHash, ...],
        found: list[Segment],
        now: float,
    ) -> list[WorkerId]:
        """Stores the segments that were not found; returns the workers that store them."""
        stored: list[WorkerId] = []
        pinned = set(names)
        parent = found[-1] if found else None
        for name, index in striped_homes(names, len(self.workers), len(found)):
            holder = owner or self.workers[index]
            if not self._make_room(tree, holder, pinned):
                break  # later segments could not be read without this one
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
            # The coefficient of variation of a multinomial distribution over the workers.
            total, others = sum(self._reads.values()), len(self.workers) - 1
            self.result.chances.append(math.sqrt(others / total))
        if self._settings.replicate and self._settings.pooled:
            self._copy_heavy_hitters()
        elif self._settings.replicate:
            self._copy_runs()
        self._heat.fade(FADE)
        self._read_lately = {worker: reads * FADE for worker, reads in self._read_lately.items()}
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
            # Making room may have dropped the segment, since its other copies were not pinned.
            if tree.get(copy.segment) is segment:
                tree.add(copy.segment, segment.parent, copy.target, now)
                self._held[copy.target] += 1
                self.result.copies_made += 1
                self.result.most_copies = max(self.result.most_copies, len(segment.copies))

    def _copy_runs(self) -> None:
        """Copies whole prefixes between the workers' own caches, as the kvmanager orders it."""
        blocks = self._settings.blocks
        runs = hot_runs(self._heat.hottest(MAX_HOT_SEGMENTS), MIN_READS)
        runs = runs[: num_heavy_hitters(len(self.workers))]
        prefixes = {
            run.name: segment_hashes(split_hashes(self._heat.prefix(run.name)), blocks)
            for run in runs
        }
        held = {
            name: {
                worker: len(tree.match(names)) * blocks
                for worker, tree in zip(self.workers, self._trees, strict=True)
            }
            for name, names in prefixes.items()
        }
        members = [self._member(*each) for each in zip(self.workers, self._trees, strict=True)]
        limits = CopyLimits(math.inf, placement=self._settings.placement)
        for copy in plan_prefix_copies(runs, held, members, members, (), limits):
            self._bring(copy.target, prefixes[copy.run])
            whole = len(prefixes[copy.run]) * blocks
            full = sum(length >= whole for length in held[copy.run].values())
            self.result.copies_made += 1
            self.result.most_copies = max(self.result.most_copies, full + 1)

    def _member(self, worker: WorkerId, tree: SegmentTree) -> PoolMember:
        since = self._window_end - WINDOW_S
        cold = sum(segment.copies[worker] < since for segment in tree)
        room = (self._settings.capacity - self._held[worker] + cold) * self._settings.blocks
        report = PoolReport(Role.PREFILL, Endpoint(worker, 0), 1, room, 0)
        return PoolMember(worker, 1, "", "", report, self._read_lately[worker])

    def _bring(self, target: WorkerId, names: tuple[BlockHash, ...]) -> None:
        tree = self._trees[self.workers.index(target)]
        found, pinned = tree.match(names), set(names)
        parent = found[-1] if found else None
        for name in names[len(found) :]:
            if not self._make_room(tree, target, pinned):
                return
            parent = tree.add(name, parent, target, self._window_end)
            self._held[target] += 1
