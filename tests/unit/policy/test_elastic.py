from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvmesh.core.types import RequestId
from kvmesh.policy.elastic import ElasticReason, Prompt, plan_elastic


def prompt(name: str, tokens: int, slo_s: float = 1e9) -> Prompt:
    return Prompt(RequestId(name), tokens, slo_s)


def latency(batch: Sequence[Prompt], num_workers: int) -> float:
    """Perfect speed-up and a cost for every worker that takes part."""
    return sum(each.context_tokens for each in batch) / num_workers + num_workers


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    plan = plan_elastic([prompt("long", 1000), prompt("a", 10), prompt("b", 10)], 4, latency)
    assert [len(batch.prompts) for batch in plan.batches] in ([1, 1, 1], [2, 1])
    assert plan.batches[-1].prompts == (prompt("long", 1000),)
    assert plan.batches[-1].num_workers >= 2
    assert plan.reason is ElasticReason.WITHIN_SLO


def test_an_objective_forces_workers_together() -> None:
    # Apart, the long prompt gets three workers: 403 s. Its objective needs all four.
    plan = plan_elastic([prompt("long", 1200, slo_s=310), prompt("a", 1)], 4, latency)
    assert [batch.num_workers for batch in plan.batches] == [4]
    assert plan.reason is ElasticReason.WITHIN_SLO


def test_impossible_objectives_are_left_out() -> None:
    plan = plan_elastic([prompt("a", 1000, slo_s=1.0), prompt("b", 10)], 2, latency)
    assert plan.reason is ElasticReason.BEST_EFFORT
    assert sum(len(batch.prompts) for batch in plan.batches) == 2


def test_the_total_counts_every_prompt() -> None:
    plan = plan_elastic([prompt("a", 10), prompt("b", 10)], 1, latency)
    assert plan.total_latency_s == pytest.approx(2 * 21)


def test_nothing_to_plan() -> None:
    assert plan_elastic([], 3, latency).reason is ElasticReason.NOTHING
