"""Computes one prompt on several prefill workers at the same time, each one layer behind the one
before. Pure.

The first worker computes the beginning of a prompt, the next one the following part, and so on;
each layer's KV goes from one worker to the next. As everywhere in routes, costs are in computed
tokens, at the speed of short contexts.
Source: TokenLake 6.2 (degree of parallelism). Tests: tests/unit/policy/test_chain.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import (
    Placement,
    PrefixSource,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.prefix_source import FetchPace
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


_WORKER_ID = attrgetter("info.worker_id")


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
        """Returns the position before which so much work lies: the inverse of `work`."""
        return 2 * work / (1 + math.sqrt(1 + 2 * self.pair_share * work))

    def of_chain(self, cuts: Sequence[int]) -> float:
        """Returns the time of a chain with parts between these positions; earlier ones are
        cached.
        """
        works = [self.work(end) - self.work(begin) for begin, end in pairwise(cuts)]
        travels = [self.travel_share * (end - cuts[0]) for end in cuts[1:-1]]
        return part_ends(works, travels, self.overhead_tokens, self.num_layers)[-1]


def part_ends(
    works: Sequence[float], travels: Sequence[float], overhead: float, num_layers: int
) -> list[float]:
    """Returns the end times of a chain's parts, in the unit of the arguments.

    A worker computes a layer when the worker before has computed it and its KV has arrived, so it
    is at most one layer behind. If a layer's KV travels longer than the layer computes, the link is
    the bottleneck.

    Args:
        works: compute time of each part.
        travels: for each part but the last, travel time of the KV of all parts up to it.
        overhead: fixed cost of each further worker.
    """
    ends: list[float] = []
    behind = before = 0.0
    for work, travel in zip(works, (*travels, 0.0), strict=True):
        layer = max(work, travel) / num_layers
        before = max(behind + layer * num_layers, before + layer)
        ends.append(before)
        behind += overhead + layer
    return ends


def cut(cost: Cost, first: int, end: int, num_parts: int, block_size: int) -> list[int]:
    """Returns positions at block boundaries that divide a prompt into parts of equal work.

    Args:
        first: first position to compute, a block boundary; all positions before it are cached.

    Returns:
        `num_parts` + 1 positions, `first` and `end` among them; fewer where parts would be empty.
    """
    before, whole = cost.work(first), cost.work(end)
    cuts = [first]
    for part in range(1, num_parts):
        position = cost.position(before + (whole - before) * part / num_parts)
        aligned = round(position / block_size) * block_size
        if cuts[-1] < aligned < end - block_size:
            cuts.append(aligned)
    return [*cuts, end]


def best_cuts(cost: Cost, first: int, end: int, num_workers: int, block_size: int) -> list[int]:
    """Returns the best division of a prompt among at most so many workers.

    Returns:
        Positions as in `cut`; only `first` and `end` if one worker should compute it alone.
    """
    alone = cost.work(end) - cost.work(first)
    best, least = [first, end], alone
    if end - first < CHAIN_TOKENS:
        return best
    for num_parts in range(2, min(num_workers, MAX_WORKERS) + 1):
        cuts = cut(cost, first, end, num_parts, block_size)
        if max(stop - begin for begin, stop in pairwise(cuts)) > MAX_PART_TOKENS:
            continue
        tokens = cost.of_chain(cuts)
        if tokens > MOST_OF_SHORTER * least:
            break
        best, least = cuts, tokens
    return best if least <= MOST_OF_ALONE * alone else [first, end]


def with_chain(plan: RoutePlan, view: FleetView, query: RouteQuery, now: float) -> RoutePlan:
    """Lets idle prefill workers compute the beginning of a prompt, if that saves enough time.

    Args:
        plan: the plan to extend; its first prefill worker computes the last part.
        now: seconds on the clock of the view's `reported_at`.
    """
    if plan.placement is not Placement.DISAGGREGATED or query.num_tokens < CHAIN_TOKENS:
        return plan
    last = plan.prefill[0]
    if last.source is not None or last.fetch is FetchReason.FETCH or last.fetch is FetchReason.ASK:
        return plan
    worker = _idle_worker(view, last.worker_id, query, now)
    if worker is None:
        return plan
    info = worker.info
    size = info.layout.block_size
    first = min(last.cached_tokens, query.num_tokens - 1) // size * size
    if query.num_tokens - first < CHAIN_TOKENS:
        return plan  # before the others are looked at: most prompts are short or cached
    beside = [
        each
        for each in view.workers
        if each is not worker
        and _is_idle(each, query, now)
        and each.info.cluster == info.cluster
        and each.info.layout == info.layout
    ]
    beside.sort(key=_WORKER_ID)
    cost = _cost(worker, view.pace)
    cuts = best_cuts(cost, first, query.num_tokens, 1 + len(beside), size)
    if len(cuts) == 2:
        return plan
    source: PrefixSource | None = None
    for each, end in zip(beside, cuts[1:-1], strict=False):
        facts = each.info
        source = PrefixSource(
            facts.worker_id,
            facts.incarnation,
            facts.control_endpoint,
            end // size,
            computes=True,
            upstream=source,
        )
    alone = cost.work(cuts[-1]) - cost.work(first)
    saved = alone - cost.of_chain(cuts)
    names = [each.worker_id for each in beside[: len(cuts) - 2]]
    spans = ", ".join(
        f"{name} up to token {end}" for name, end in zip(names, cuts[1:-1], strict=True)
    )
    reason = f"{plan.reason}; computed with {spans}, {saved / alone:.0%} sooner"
    chained = replace(last, source=source, fetch=FetchReason.CHAIN)
    return replace(
        plan, prefill=(chained, *plan.prefill[1:]), cause=RouteCause.CHAIN, reason=reason
    )


def upstream_parts(source: PrefixSource | None) -> list[PrefixSource]:
    """Returns the sources that compute the beginning of a prompt, first part first; may be
    empty.
    """
    found: list[PrefixSource] = []
    while source is not None and source.computes:
        found.insert(0, source)
        source = source.upstream
    return found


def _cost(worker: WorkerView, pace: FetchPace) -> Cost:
    info = worker.info
    return Cost(
        info.pair_share, pace.share(inside=True), pace.overhead_tokens, info.layout.num_layers
    )


def _idle_worker(
    view: FleetView, worker_id: WorkerId, query: RouteQuery, now: float
) -> WorkerView | None:
    """Returns the worker with this id if it is idle."""
    for each in view.workers:
        if each.info.worker_id == worker_id:
            return each if _is_idle(each, query, now) else None
    return None


def _is_idle(worker: WorkerView, query: RouteQuery, now: float) -> bool:
    """Whether the worker has no other prompt, which would wait for its part; answers go on."""
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
