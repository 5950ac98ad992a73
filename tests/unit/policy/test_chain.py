from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import Role, RouteCause, RoutePlan, WorkerId
from kvmesh.policy.chain import (
    CHAIN_TOKENS,
    Cost,
    best_cuts,
    cut,
    prefix_behind,
    travelling,
    upstream_parts,
)
from kvmesh.policy.composition import COMPOSITIONS, DEFAULT, decide_route
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.view import WorkerView
from tests.unit.policy.fleet_examples import NOW, fleet
from tests.unit.policy.fleet_examples import query as query_of
from tests.unit.policy.fleet_examples import worker as worker_of

SIZE = 16
UNKNOWN = FetchPace()
NOTHING: Mapping[str, int] = MappingProxyType({})
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
    cost = replace(COST, pair_share=pair_share, travel_share=0.0)
    first, end = num_cached * SIZE, num_cached * SIZE + length
    cuts = cut(cost, cost.head(first, end), end, num_parts, SIZE)
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
    (_, middle, _) = cut(COST, COST.head(0, 8192), 8192, 2, SIZE)
    assert 0.59 < middle / 8192 < 0.66


def test_more_workers_are_sooner_until_they_are_not_worth_it() -> None:
    head = COST.head(0, 32_768)
    costs = [COST.of_chain(cut(COST, head, 32_768, parts, SIZE)) for parts in (1, 2, 3, 4)]
    assert costs == sorted(costs, reverse=True)
    assert COST.of_chain([0, 32_768]) / costs[1] == pytest.approx(1.84, abs=0.1)
    assert len(best(0, 32_768, 3)) == 4


def best(first: int, end: int, num_workers: int, cost: Cost = COST) -> list[int]:
    """The best cuts of a prompt of which all workers have what is before `first`."""
    cuts, tokens = best_cuts(cost, cost.head(first, end), end, num_workers, SIZE)
    assert tokens == pytest.approx(cost.of_chain(cuts))
    return cuts


def test_a_short_rest_and_a_thin_link_are_left_to_one_worker() -> None:
    assert best(0, CHAIN_TOKENS - 1, 4) == [0, CHAIN_TOKENS - 1]
    first = 8192 - CHAIN_TOKENS // 2
    assert best(first, 8192, 4) == [first, 8192]
    assert best(0, 8192, 1) == [0, 8192]
    assert len(best(0, 131_072, 2)) == 3
    assert best(0, 200_000, 2) == [0, 200_000], "parts would be too long"
    assert len(best(0, 90_000, 8)) > 6
    thin = replace(COST, travel_share=4.0)
    assert best(0, 8192, 4, thin) == [0, 8192]


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0.1, 3.0), st.integers(2, 5))
def test_no_other_cut_is_sooner_over_any_link(
    num_cached: int, num_held: int, travel_share: float, num_parts: int
) -> None:
    """Compared with moving all inner cuts together, a block or more to either side."""
    cost = replace(COST, travel_share=travel_share, overhead_tokens=0.0, num_layers=10_000)
    end = 16_384
    head = replace(cost.head(num_cached * SIZE, end), held=min(num_held, num_cached) * SIZE)
    cuts = cut(cost, head, end, num_parts, SIZE)
    if len(cuts) == 2:
        return
    found = cost.of_chain(cuts, head)
    block = (1 + travel_share) * SIZE * (1 + cost.pair_share * end)
    for by in (-4096, -256, -SIZE, SIZE, 256, 4096):
        moved = [head.first, *(each + by for each in cuts[1:-1]), end]
        if moved == sorted(set(moved)):
            assert found <= cost.of_chain(moved, head) + block


def test_a_thin_link_moves_the_last_cut_forward_until_it_is_no_bottleneck() -> None:
    thin = replace(COST, travel_share=2.0)
    (_, middle, _) = best(0, 8192, 2, thin)
    (_, equal, _) = best(0, 8192, 2)
    assert middle < equal
    assert thin.travel_share * middle == pytest.approx(thin.between(middle, 8192), rel=0.01)
    assert thin.of_chain([0, middle, 8192]) < 0.9 * thin.of_chain([0, equal, 8192])


def test_what_the_last_worker_has_does_not_travel_to_it() -> None:
    assert travelling([0, 4000, 6000, 9000], held=1000) == [4000, 5000]
    assert travelling([0, 4000, 9000], held=5000) == [0]
    assert travelling([0, 9000], held=0) == []


def test_a_chain_begins_when_its_prefix_is_there() -> None:
    head = COST.head(4096, 32_768)
    cuts = cut(COST, head, 32_768, 3, SIZE)
    soon = COST.of_chain(cuts, head)
    assert COST.of_chain(cuts, replace(head, before=500.0)) == pytest.approx(soon + 500.0)


def worker(name: str, role: Role = Role.PREFILL, **changes: object) -> WorkerView:
    made = worker_of(name, role)
    layout = replace(made.info.layout, num_layers=12)
    info = replace(made.info, layout=layout, pair_share=2e-4, num_blocks=4096, max_model_len=65_536)
    load = replace(made.load, blocks_free=4096)
    return replace(made, info=info, load=load, **changes)  # type: ignore[arg-type]


def decided(
    *workers: WorkerView,
    num_tokens: int = 16_384,
    policy: str = DEFAULT,
    held: Mapping[str, int] = NOTHING,
    pace: FetchPace = UNKNOWN,
) -> RoutePlan:
    """The plan of a prompt.

    Args:
        held: leading tokens that workers hold.
    """
    made = decide_route(
        COMPOSITIONS[policy],
        replace(fleet(*workers), pace=pace),
        query_of(num_tokens),
        {WorkerId(name): tokens // SIZE for name, tokens in held.items()},
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


def test_the_first_worker_fetches_what_only_the_last_one_has() -> None:
    plan = decided(worker("p0"), worker("p1"), DECODE, held={"p1": 4096})
    last = plan.prefill[0]
    assert (last.worker_id, plan.cause) == ("p1", RouteCause.CHAIN)
    (part,) = upstream_parts(last.source)
    prefix = prefix_behind(last.source)
    assert prefix is not None
    assert (prefix.worker_id, prefix.num_blocks) == ("p1", 4096 // SIZE)
    middle = 4096 + (16_384 - 4096) // 2
    assert middle < part.num_blocks * SIZE < middle + 1500, "cached tokens are no work"
    assert "p0 fetches from p1" in plan.reason


def test_over_a_thin_link_the_first_worker_computes_what_the_last_one_has() -> None:
    thin = FetchPace(token_s=1e-4, inside_token_s=9e-5)
    plan = decided(worker("p0"), worker("p1"), DECODE, held={"p1": 256}, pace=thin)
    last = plan.prefill[0]
    assert (last.worker_id, plan.cause) == ("p1", RouteCause.CHAIN)
    assert prefix_behind(last.source) is None


def test_what_the_last_worker_would_fetch_goes_to_the_first_one() -> None:
    holder = replace(worker("d"), info=replace(DECODE.info, role=Role.DECODE))
    plan = decided(worker("p0"), worker("p1"), holder, held={"d": 4096})
    assert plan.cause is RouteCause.CHAIN
    last = plan.prefill[0]
    (part,) = upstream_parts(last.source)
    prefix = prefix_behind(last.source)
    assert prefix is not None
    assert prefix.worker_id == "d"
    assert part.upstream == prefix


def test_whoever_has_the_most_computes_the_first_part() -> None:
    held = {"p1": 1024, "p2": 8192}
    names = [f"p{number}" for number in range(4)]
    plan = decided(*map(worker, names), DECODE, held=held, num_tokens=32_768)
    first, *_ = upstream_parts(plan.prefill[0].source)
    used = {each.worker_id for each in upstream_parts(plan.prefill[0].source)}
    assert plan.prefill[0].worker_id == "p2", "who has the most has the least to compute"
    assert first.worker_id == "p1"
    assert used == {"p0", "p1", "p3"}


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
