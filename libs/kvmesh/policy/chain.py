"""One prompt on several prefill workers at the same time, one layer behind each other. Pure.

The first worker computes the beginning of a prompt, the next one what follows, and so on; each
layer's KV goes from one to the next. Costs are counted as everywhere in routes: in tokens that are
computed, at the pace of short contexts.
Source: TokenLake 6.2 (degree of parallelism). Tests: tests/unit/policy/test_chain.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import (
    Placement,
    PrefixSource,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
)
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView

CHAIN_TOKENS = 2048
"""Shorter prompts, uncached, are computed by one worker: others come meanwhile."""

MOST_OF_ALONE = 0.7
"""A chain has to save 30 % of the time on one worker."""

MOST_OF_SHORTER = 0.9
"""Each further worker has to save 10 % of the time without it."""

MAX_WORKERS = 8

MAX_PART_TOKENS = 32_768
"""A part is one step, and what its positions carry from layer to layer is in memory at once."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What positions of a prompt cost.

    Attributes:
        pair_share: attention to one position, as a share of a token's other work.
        travel_share: time in which KV of a token travels, as a share of that.
        overhead_tokens: of each worker that is asked.
        num_layers: of the model.
    """

    pair_share: float
    travel_share: float
    overhead_tokens: float
    num_layers: int

    def work(self, end: float) -> float:
        """Of the positions before `end`."""
        return end + self.pair_share * end * end / 2

    def position(self, work: float) -> float:
        """The inverse of `work`."""
        return 2 * work / (1 + math.sqrt(1 + 2 * self.pair_share * work))

    def of_chain(self, cuts: Sequence[int]) -> float:
        """Of a chain whose parts are between these positions; those before are cached."""
        works = [self.work(end) - self.work(begin) for begin, end in pairwise(cuts)]
        travels = [self.travel_share * (end - cuts[0]) for end in cuts[1:-1]]
        return part_ends(works, travels, self.overhead_tokens, self.num_layers)[-1]


def part_ends(
    works: Sequence[float], travels: Sequence[float], overhead: float, num_layers: int
) -> list[float]:
    """When the parts of a chain end, in the unit of the arguments.

    A worker computes a layer when the one before it has computed it and its KV has come: at most a
    layer behind. Where KV travels longer than a layer is computed, the link sets the pace.

    Args:
        works: of each part.
        travels: of the KV of all parts so far, behind each part but the last.
        overhead: of each worker that is asked.
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
    """Positions between which parts of equal work lie, at block boundaries.

    Args:
        first: of the first part, a block boundary; what is before it is cached.

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
    """How to divide a prompt among at most so many workers.

    Returns:
        As `cut`; `first` and `end` alone where one worker is to compute it.
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
    """Lets idle prefill workers compute the beginning of a prompt, where its first token comes
    sooner by so much that it is worth their time.

    Args:
        plan: the workers that are tried before others.
        now: seconds on the clock of the view's `reported_at`.
    """
    if plan.placement is not Placement.DISAGGREGATED or query.num_tokens < CHAIN_TOKENS:
        return plan
    last = plan.prefill[0]
    if last.source is not None or last.fetch in {FetchReason.FETCH, FetchReason.ASK}:
        return plan
    idle = {each.worker_id: each for each in view.workers if _is_idle(each, query, now)}
    worker = idle.pop(last.worker_id, None)
    if worker is None:
        return plan
    info = worker.info
    beside = [
        each
        for each in idle.values()
        if each.info.cluster == info.cluster and each.info.layout == info.layout
    ]
    beside.sort(key=lambda each: each.worker_id)
    size = info.layout.block_size
    first = min(last.cached_tokens, query.num_tokens - 1) // size * size
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
    """Who computes the beginning of a prompt, its first tokens first; empty where nobody does."""
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


def _is_idle(worker: WorkerView, query: RouteQuery, now: float) -> bool:
    """Whether nothing else would wait for its part of a prompt, which is one long step."""
    info, load = worker.info, worker.load
    return (
        info.role is Role.PREFILL
        and info.pair_share > 0
        and info.model == query.model
        and not load.draining
        and not (worker.prefill_used or worker.pending_tokens or worker.decode_used)
        and worker.worker_id not in query.avoid
        and now - worker.reported_at <= SILENT_AFTER_S
        and load.blocks_free * info.layout.block_size >= query.num_tokens
        and info.max_model_len > query.num_tokens
    )
