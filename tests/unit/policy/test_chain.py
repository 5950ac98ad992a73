from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import Role, RouteCause, RoutePlan, WorkerId
from kvmesh.policy.chain import CHAIN_TOKENS, Cost, best_cuts, cut, upstream_parts
from kvmesh.policy.composition import COMPOSITIONS, DEFAULT, decide_route
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.view import WorkerView
from tests.unit.policy.fleet_examples import NOW, fleet
from tests.unit.policy.fleet_examples import query as query_of
from tests.unit.policy.fleet_examples import worker as worker_of

SIZE = 16
COST = Cost(pair_share=2e-4, travel_share=0.05, overhead_tokens=64.0, num_layers=12)


@given(
    st.integers(0, 200),
    st.integers(CHAIN_TOKENS, 100_000),
    st.integers(2, 8),
    st.floats(0.0, 1e-2),
)
def test_parts_are_of_equal_work_within_a_block(
    num_cached: int, length: int, num_parts: int, pair_share: float
) -> None:
    cost = replace(COST, pair_share=pair_share)
    first, end = num_cached * SIZE, num_cached * SIZE + length
    cuts = cut(cost, first, end, num_parts, SIZE)
    assert cuts[0] == first
    assert cuts[-1] == end
    assert cuts == sorted(set(cuts))
    assert all(each % SIZE == 0 for each in cuts[:-1])
    if len(cuts) == num_parts + 1:
        share = (cost.work(end) - cost.work(first)) / num_parts
        block = cost.work(end) - cost.work(end - SIZE)
        for begin, stop in pairwise(cuts):
            assert cost.work(stop) - cost.work(begin) == pytest.approx(share, abs=1.01 * block)


def test_the_first_of_two_parts_is_the_longer_one() -> None:
    (_, middle, _) = cut(COST, 0, 8192, 2, SIZE)
    assert 0.59 < middle / 8192 < 0.66


def test_more_workers_are_sooner_until_they_are_not_worth_it() -> None:
    costs = [COST.of_chain(cut(COST, 0, 32_768, parts, SIZE)) for parts in (1, 2, 3, 4)]
    assert costs == sorted(costs, reverse=True)
    assert COST.of_chain([0, 32_768]) / costs[1] == pytest.approx(1.84, abs=0.1)
    assert len(best_cuts(COST, 0, 32_768, 3, SIZE)) == 4


def test_a_short_rest_and_a_thin_link_are_left_to_one_worker() -> None:
    assert best_cuts(COST, 0, CHAIN_TOKENS - 1, 4, SIZE) == [0, CHAIN_TOKENS - 1]
    first = 8192 - CHAIN_TOKENS // 2
    assert best_cuts(COST, first, 8192, 4, SIZE) == [first, 8192]
    assert best_cuts(COST, 0, 8192, 1, SIZE) == [0, 8192]
    assert len(best_cuts(COST, 0, 131_072, 2, SIZE)) == 3
    assert best_cuts(COST, 0, 200_000, 2, SIZE) == [0, 200_000], "parts would be too long"
    assert len(best_cuts(COST, 0, 90_000, 8, SIZE)) > 6
    thin = replace(COST, travel_share=3.0)
    assert best_cuts(thin, 0, 8192, 4, SIZE) == [0, 8192]


def worker(name: str, role: Role = Role.PREFILL, **changes: object) -> WorkerView:
    made = worker_of(name, role)
    layout = replace(made.info.layout, num_layers=12)
    info = replace(made.info, layout=layout, pair_share=2e-4, num_blocks=4096, max_model_len=65_536)
    load = replace(made.load, blocks_free=4096)
    return replace(made, info=info, load=load, **changes)  # type: ignore[arg-type]


def decided(*workers: WorkerView, num_tokens: int = 16_384, policy: str = DEFAULT) -> RoutePlan:
    made = decide_route(
        COMPOSITIONS[policy],
        fleet(*workers),
        query_of(num_tokens),
        {},
        NOW,
        OffloadState(),
    ).route
    assert isinstance(made, RoutePlan)
    return made


DECODE = worker("d", Role.DECODE)


def test_idle_workers_compute_a_long_prompt_together() -> None:
    plan = decided(worker("p0"), worker("p1"), DECODE)
    chosen, other = plan.prefill
    assert plan.cause is RouteCause.CHAIN
    assert (chosen.fetch, other.source) == (FetchReason.CHAIN, None)
    (part,) = upstream_parts(chosen.source)
    assert part.worker_id == other.worker_id
    assert "sooner" in plan.reason
    assert decided(worker("p0"), worker("p1"), DECODE, num_tokens=1024).cause is RouteCause.LOAD


def test_each_part_of_three_has_the_one_before_it() -> None:
    plan = decided(*(worker(f"p{number}") for number in range(3)), DECODE)
    parts = upstream_parts(plan.prefill[0].source)
    assert len(parts) == 2
    assert parts[0].num_blocks < parts[1].num_blocks
    names = {plan.prefill[0].worker_id, *(each.worker_id for each in parts)}
    assert names == {"p0", "p1", "p2"}


@pytest.mark.parametrize("why", ["busy", "old", "layout", "cannot", "decodes"])
def test_a_worker_that_is_not_idle_or_cannot_is_left_out(why: str) -> None:
    other = worker("p1")
    if why == "busy":
        other = replace(other, pending_tokens=10)
    elif why == "old":
        other = replace(other, reported_at=NOW - 10)
    elif why == "layout":
        layout = replace(other.info.layout, model_fingerprint="another")
        other = replace(other, info=replace(other.info, layout=layout))
    elif why == "cannot":
        other = replace(other, info=replace(other.info, pair_share=0.0))
    else:
        other = replace(other, info=replace(other.info, role=Role.DECODE))
    plan = decided(worker("p0"), other, DECODE)
    assert not upstream_parts(plan.prefill[0].source)
    assert plan.cause is not RouteCause.CHAIN


def test_a_worker_of_both_roles_takes_a_part_beside_its_answers() -> None:
    other = worker("p1", Role.HYBRID)
    other = replace(other, load=replace(other.load, decode_running=2))
    plan = decided(worker("p0"), other, DECODE)
    assert plan.cause is RouteCause.CHAIN
    busy = replace(other, load=replace(other.load, prefill_active=1))
    assert decided(worker("p0"), busy, DECODE).cause is not RouteCause.CHAIN


def test_policies_of_papers_leave_a_prompt_to_one_worker() -> None:
    plan = decided(worker("p0"), worker("p1"), DECODE, policy="prfaas")
    assert plan.cause is not RouteCause.CHAIN
    assert plan.prefill[0].worker_id in {WorkerId("p0"), WorkerId("p1")}
