"""Computes one prompt on several prefill workers at the same time, each one layer behind the one
before. Pure.

The first worker computes the beginning of a prompt, the next one the following part, and so on;
each layer's KV goes from one worker to the next. A cached prefix that the first worker lacks is
fetched there, from the last worker or from that worker's source. As in all routes, costs are in
computed tokens, at the speed of short contexts.
Source: TokenLake 6.2 (degree of parallelism). Tests: tests/unit/policy/test_chain.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import (
    Candidate,
    Placement,
    PrefixSource,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.prefix_source import MIN_FETCH_TOKENS, FetchPace, saved_tokens
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView

CHAIN_TOKENS = 2048
"""Minimum number of uncached tokens for a chain; shorter prompts leave the other workers free for
requests that arrive meanwhile."""

MOST_OF_ALONE = 0.7
"""Largest time of a chain as a fraction of one worker's: it has to save 30 %."""

MOST_OF_SHORTER = 0.9
"""Largest time of a chain as a fraction of that with one worker less: each has to save 10 %."""

MAX_WORKERS = 8

MAX_PART_TOKENS = 98_304
"""Maximum tokens of a part: what they carry from layer to layer is in memory at once. Two workers
can share a prompt of 128K tokens: its first part is at most 0.71 of it."""


@dataclass(frozen=True, slots=True)
class Head:
    """The state of a prompt before its chain begins, in tokens.

    Attributes:
        first: first position that the first worker computes, a block boundary.
        held: leading positions whose KV the last worker has; it does not travel there.
        before: cost of fetching or loading until the first worker begins.
        alone: cost of the whole prompt on the last worker alone.
        source: where the first worker fetches the positions before `first` that it lacks.
    """

    first: int
    held: int
    before: float
    alone: float
    source: PrefixSource | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost model of a prompt's positions, in computed tokens.

    Attributes:
        pair_share: work of attention to one position, as a fraction of a token's other work.
        travel_share: time for a token's KV to travel, as a fraction of the same.
        overhead_tokens: fixed cost of each further worker.
        num_layers: number of layers of the model.
    """

    pair_share: float
    travel_share: float
    overhead_tokens: float
    num_layers: int

    def work(self, end: float) -> float:
        """Returns the work of the positions before `end`."""
        return end + self.pair_share * end * end / 2

    def position(self, work: float) -> float:
        """Returns the position before which this work lies: the inverse of `work`."""
        return 2 * work / (1 + math.sqrt(1 + 2 * self.pair_share * work))

    def carried(self, end: int, held: int) -> float:
        """Returns the position up to which KV travels for as long as the positions from there to
        `end` are computed.

        Args:
            held: leading positions whose KV does not travel.
        """
        # travel * (position - held) = work(end) - work(position)
        linear = 1 + self.travel_share
        work = self.work(end) + self.travel_share * held
        return 2 * work / (linear + math.sqrt(linear * linear + 2 * self.pair_share * work))

    def between(self, first: float, end: float) -> float:
        """Returns the work of the positions from `first` to `end`."""
        return self.work(end) - self.work(first)

    def head(self, first: int, end: int) -> Head:
        """Returns the head of a prompt whose positions before `first` every worker has."""
        return Head(first, first, 0.0, self.between(first, end))

    def of_chain(self, cuts: Sequence[int], head: Head | None = None) -> float:
        """Returns the time of a chain with parts between these positions.

        Args:
            head: None if every worker has the positions before.
        """
        head = head or self.head(cuts[0], cuts[-1])
        works = [self.between(*span) for span in pairwise(cuts)]
        travels = [self.travel_share * tokens for tokens in travelling(cuts, head.held)]
        ends = part_ends(works, travels, self.overhead_tokens, self.num_layers, head.before)
        return ends[-1]


def travelling(cuts: Sequence[int], held: int) -> list[int]:
    """Returns the tokens whose KV each part but the last sends on.

    Args:
        held: leading tokens that the last worker has; those between have nothing of their own.
    """
    inner = cuts[1:-1]
    return [*inner[:-1], *(max(end - held, 0) for end in inner[-1:])]


def part_ends(
    works: Sequence[float],
    travels: Sequence[float],
    overhead: float,
    num_layers: int,
    begin: float = 0.0,
) -> list[float]:
    """Returns the end times of a chain's parts, in the unit of the arguments.

    A worker computes a layer when the worker before has computed it and its KV has arrived, so it
    is at most one layer behind. If a layer's KV travels longer than the layer computes, the link is
    the bottleneck.

    Args:
        works: compute time of each part.
        travels: for each part but the last, travel time of the KV of all parts up to it.
        overhead: fixed cost of each further worker.
        begin: when the first part begins.
    """
    ends: list[float] = []
    behind = before = begin
    for work, travel in zip(works, (*travels, 0.0), strict=True):
        layer = max(work, travel) / num_layers
        before = max(behind + layer * num_layers, before + layer)
        ends.append(before)
        behind += overhead + layer
    return ends


def cut(cost: Cost, head: Head, end: int, num_parts: int, block_size: int) -> list[int]:
    """Returns positions at block boundaries that divide a prompt into parts of equal work.

    Where the link is the bottleneck, the last part begins earlier: it computes for as long as the
    KV before it travels, and the other parts are equal.

    Returns:
        `num_parts` + 1 positions, `head.first` and `end` among them; fewer where parts would be
        empty.
    """
    before, whole = cost.work(head.first), cost.work(end)
    others = num_parts - 1
    work = (whole - before) * others / num_parts
    if others:
        work = min(work, cost.work(cost.carried(end, head.held)) - before)
    cuts = [head.first]
    for part in range(1, num_parts):
        position = cost.position(max(before + work * part / others, 0.0))
        aligned = round(position / block_size) * block_size
        if cuts[-1] < aligned < end - block_size:
            cuts.append(aligned)
    return [*cuts, end]


def divisions(
    cost: Cost, head: Head, end: int, num_workers: int, block_size: int
) -> Iterator[tuple[list[int], float]]:
    """Yields the best division of a prompt among at most 1, 2, ... workers, and its time.

    It ends with the last worker that saves enough. Positions are as in `cut`; only the first and
    `end` where one worker should compute all of it.
    """
    alone = [head.first, end], head.alone
    yield alone
    if end - head.first < CHAIN_TOKENS:
        return
    best, least = alone
    for num_parts in range(2, min(num_workers, MAX_WORKERS) + 1):
        cuts = cut(cost, head, end, num_parts, block_size)
        if max(stop - begin for begin, stop in pairwise(cuts)) <= MAX_PART_TOKENS:
            tokens = cost.of_chain(cuts, head)
            if tokens > MOST_OF_SHORTER * least:
                return
            best, least = cuts, tokens
        yield (best, least) if least <= MOST_OF_ALONE * head.alone else alone


def best_cuts(
    cost: Cost, head: Head, end: int, num_workers: int, block_size: int
) -> tuple[list[int], float]:
    """Returns the best division of a prompt among at most this many workers; see `divisions`."""
    *_, best = divisions(cost, head, end, num_workers, block_size)
    return best


class Chaining:
    """The chain that a prompt's last worker may form with idle ones beside it.

    Args:
        last: candidate that computes the last part.
        worker: that worker; it is idle.
        beside: idle workers of its cluster and layout.
        matches: number of the query's leading blocks that each worker holds.
    """

    def __init__(
        self,
        last: Candidate,
        worker: WorkerView,
        beside: Sequence[WorkerView],
        query: RouteQuery,
        matches: Mapping[WorkerId, int],
        pace: FetchPace,
    ) -> None:
        info = worker.info
        self._last, self._info = last, info
        self._size = size = info.layout.block_size
        self._end = query.num_tokens
        self._most = (query.num_tokens - 1) // size
        held = {each.worker_id: matches.get(each.worker_id, 0) for each in beside}
        # The first worker is one that has the most of the prompt.
        self._beside = sorted(beside, key=lambda each: (-held[each.worker_id], each.worker_id))
        mine = held[self._beside[0].worker_id] if beside else 0
        self._cost = Cost(
            info.pair_share, pace.inside_share, pace.overhead_tokens, info.layout.num_layers
        )
        self._head = self._begin(min(mine, self._most) * size, pace)

    @property
    def times(self) -> tuple[float, ...]:
        """Time of the prompt on at most 1, 2, ... of the workers; further ones save nothing."""
        most = 1 + len(self._beside)
        found = divisions(self._cost, self._head, self._end, most, self._size)
        return tuple(tokens for _, tokens in found)

    def extend(self, plan: RoutePlan, num_workers: int = MAX_WORKERS) -> RoutePlan:
        """Returns the plan with a chain of at most this many workers, or unchanged."""
        most = min(num_workers, 1 + len(self._beside))
        cuts, tokens = best_cuts(self._cost, self._head, self._end, most, self._size)
        if len(cuts) == 2:
            return plan
        source = self._head.source
        names: list[str] = []
        for each, end in zip(self._beside, cuts[1:-1], strict=False):
            facts = each.info
            source = PrefixSource(
                facts.worker_id,
                facts.incarnation,
                facts.control_endpoint,
                end // self._size,
                computes=True,
                upstream=source,
            )
            names.append(f"{facts.worker_id} up to token {end}")
        assert source is not None, "it has a part before the last one"
        if self._last.source is not None:
            source = replace(source, before_load=self._last.source.before_load)
        sooner = 1 - tokens / self._head.alone
        reason = f"{plan.reason}; computed with {', '.join(names)}, {sooner:.0%} sooner"
        fetched = self._head.source
        if fetched is not None and fetched.worker_id == self._last.worker_id:
            reader = self._beside[0].worker_id
            reason += f", behind what {reader} fetches from {fetched.worker_id}"
        chained = replace(self._last, source=source, fetch=FetchReason.CHAIN)
        return replace(
            plan, prefill=(chained, *plan.prefill[1:]), cause=RouteCause.CHAIN, reason=reason
        )

    def _begin(self, mine: int, pace: FetchPace) -> Head:
        """Returns where the chain begins, if its first worker holds `mine` tokens."""
        last, size, cost = self._last, self._size, self._cost
        held = min(last.cached_tokens // size, self._most) * size
        before = last.load_tokens
        source, known = last.source, held
        if source is None:
            alone = before + cost.between(held, self._end)
            info = self._info
            source = PrefixSource(
                info.worker_id, info.incarnation, info.control_endpoint, held // size
            )
            missing = held - mine
            saved = saved_tokens(missing, 0.0, pace.overhead_tokens, pace.inside_share)
            fetch = missing - saved
        else:
            known = min(source.num_blocks, self._most) * size
            # The last worker's own fetch tells how fast this one is.
            fetch = max(known - held + (before if source.before_load else 0.0), 0.0)
            fetch = max(fetch - last.saved_tokens, 0.0)
            before = 0.0 if source.before_load else before
            alone = before + fetch + cost.between(known, self._end)
            missing = known - mine
            saved = missing - fetch
        if missing < MIN_FETCH_TOKENS or saved <= 0:
            return Head(mine, held, before, alone)
        return Head(known, held, before + fetch, alone, source)


def chaining(
    last: Candidate,
    view: FleetView,
    query: RouteQuery,
    matches: Mapping[WorkerId, int] | None,
    now: float,
    without: frozenset[WorkerId] = frozenset(),
) -> Chaining | None:
    """Returns the chain that a candidate may form with idle workers; None if it forms none.

    Args:
        last: candidate that computes the last part.
        now: seconds on the clock of the view's `reported_at`.
        without: workers that take no part.
    """
    if query.num_tokens < CHAIN_TOKENS or last.fetch is FetchReason.ASK:
        return None
    if query.num_tokens - last.cached_tokens < CHAIN_TOKENS:
        return None  # before the other workers are checked: most prompts are short or cached
    worker = _idle_worker(view, last.worker_id, query, now)
    if worker is None:
        return None
    info = worker.info
    beside = [
        each
        for each in view.workers
        if each is not worker
        and _is_idle(each, query, now)
        and each.info.cluster == info.cluster
        and each.info.layout == info.layout
        and each.info.worker_id not in without
    ]
    return Chaining(last, worker, beside, query, matches or {}, view.pace)


def with_chain(
    plan: RoutePlan,
    view: FleetView,
    query: RouteQuery,
    matches: Mapping[WorkerId, int] | None,
    now: float,
) -> RoutePlan:
    """Lets idle prefill workers compute the beginning of a prompt, if that saves enough time.

    Args:
        plan: the plan to extend; its first prefill worker computes the last part.
        now: seconds on the clock of the view's `reported_at`.
    """
    if plan.placement is not Placement.DISAGGREGATED:
        return plan
    chain = chaining(plan.prefill[0], view, query, matches, now)
    return plan if chain is None else chain.extend(plan)


def upstream_parts(source: PrefixSource | None) -> list[PrefixSource]:
    """Returns the sources that compute the beginning of a prompt, first part first; may be
    empty.
    """
    found: list[PrefixSource] = []
    while source is not None and source.computes:
        found.insert(0, source)
        source = source.upstream
    return found


def prefix_behind(source: PrefixSource | None) -> PrefixSource | None:
    """Returns where the first worker of a chain fetches the prompt's prefix; None: nowhere."""
    while source is not None and source.computes:
        source = source.upstream
    return source


def _idle_worker(
    view: FleetView, worker_id: WorkerId, query: RouteQuery, now: float
) -> WorkerView | None:
    """Returns the worker with this id if it is idle."""
    for each in view.workers:
        if each.info.worker_id == worker_id:
            return each if _is_idle(each, query, now) else None
    return None


def _is_idle(worker: WorkerView, query: RouteQuery, now: float) -> bool:
    """Whether the worker has no other prompt, which would wait for its part. It may decode."""
    info, load = worker.info, worker.load
    return (
        (info.role is Role.PREFILL or info.role is Role.HYBRID)
        and info.pair_share > 0
        and info.model == query.model
        and not load.draining
        and not (worker.prefill_used or worker.pending_tokens)
        and worker.worker_id not in query.avoid
        and now - worker.reported_at <= SILENT_AFTER_S
        and load.blocks_free * info.layout.block_size >= query.num_tokens
        and info.max_model_len > query.num_tokens
    )
