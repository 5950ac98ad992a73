"""Chooses the prompts of each batch and its number of workers, for the least total latency.

Source: TokenLake 6.2 (dynamic program and its fallback).
Tests: tests/unit/policy/test_elastic.py, tests/property/test_policy_properties.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.core.types import RequestId


class ElasticReason(enum.Enum):
    """Kind of a plan's result; operators see the value."""

    WITHIN_SLO = "within_slo"
    """Every batch meets its objective."""
    BEST_EFFORT = "best_effort"
    """No plan meets all objectives, so the plan ignores them."""
    NOTHING = "nothing"
    """There is nothing to plan."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of the next step.

    Attributes:
        context_tokens: number of cached and new tokens.
        slo_s: longest latency of a batch with this prompt, in the unit of the latency.
    """

    request_id: RequestId
    context_tokens: int
    slo_s: float


BatchLatency = Callable[[Sequence[Prompt], int], float]
"""T of 6.2: returns the seconds of a batch on so many workers, at the cache load of the step."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts that run together on `num_workers` workers."""

    prompts: tuple[Prompt, ...]
    num_workers: int


@dataclass(frozen=True, slots=True)
class ElasticPlan:
    """Batches that cover all prompts.

    Attributes:
        total_latency_s: sum over the prompts of the latency of their batch.
    """

    batches: tuple[Batch, ...]
    total_latency_s: float
    reason: ElasticReason


def plan_elastic(prompts: Sequence[Prompt], num_workers: int, latency: BatchLatency) -> ElasticPlan:
    """Divides prompts and workers into batches (6.2), in O(M^2 N^2) for M prompts and N workers.

    If no division keeps all SLOs, only total latency counts (throughput mode): the prompts run, and
    later prompts do not wait behind them.
    """
    if not prompts:
        return ElasticPlan((), 0.0, ElasticReason.NOTHING)
    ordered = sorted(prompts, key=lambda each: (each.context_tokens, each.request_id))
    table = _costs(ordered, num_workers, latency)
    batches = _solve(ordered, num_workers, table, keep_slo=True)
    reason = ElasticReason.WITHIN_SLO
    if batches is None:
        batches = _solve(ordered, num_workers, table, keep_slo=False)
        reason = ElasticReason.BEST_EFFORT
    assert batches is not None, "one batch on all workers is always a plan"
    total = sum(len(b.prompts) * latency(b.prompts, b.num_workers) for b in batches)
    return ElasticPlan(tuple(batches), total, reason)


_Costs = dict[tuple[int, int, int], float]


def _costs(prompts: list[Prompt], num_workers: int, latency: BatchLatency) -> _Costs:
    """Returns the latency for each (first, one past last, workers); each is computed once."""
    return {
        (first, last, workers): latency(prompts[first:last], workers)
        for last in range(1, len(prompts) + 1)
        for first in range(last)
        for workers in range(1, num_workers + 1)
    }


def _solve(
    prompts: list[Prompt], num_workers: int, costs: _Costs, *, keep_slo: bool
) -> list[Batch] | None:
    count = len(prompts)
    # best[i][k]: least total latency of the first i prompts on exactly k workers.
    best = [[math.inf] * (num_workers + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    came_from: dict[tuple[int, int], tuple[int, int]] = {}
    for last in range(1, count + 1):
        slo = math.inf
        for first in reversed(range(last)):
            slo = min(slo, prompts[first].slo_s)
            for workers in range(1, num_workers + 1):
                cost = costs[first, last, workers]
                if keep_slo and cost > slo:
                    continue
                for before in range(num_workers - workers + 1):
                    total = best[first][before] + (last - first) * cost
                    if total < best[last][before + workers]:
                        best[last][before + workers] = total
                        came_from[last, before + workers] = (first, before)
    used = min(range(num_workers + 1), key=lambda workers: best[count][workers])
    if math.isinf(best[count][used]):
        return None
    return _trace(prompts, came_from, used)


def _trace(
    prompts: list[Prompt], came_from: dict[tuple[int, int], tuple[int, int]], used: int
) -> list[Batch]:
    batches: list[Batch] = []
    last = len(prompts)
    while last:
        first, before = came_from[last, used]
        batches.append(Batch(tuple(prompts[first:last]), used - before))
        last, used = first, before
    return batches[::-1]
