from __future__ import annotations

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.types import (
    Placement,
    Refusal,
    RefusalReason,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.ranking import RoutePolicy
from kvmesh.policy.routing import plan_route
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import LAYOUT, NOW, POLICIES, query, worker

LAYOUTS = (LAYOUT, dataclasses.replace(LAYOUT, model_fingerprint="other"))
NAMES = [f"w{i}" for i in range(8)]
SERVING = [role for role in Role if role is not Role.SPARE]  # spares drain in a view


@st.composite
def workers(draw: st.DrawFn) -> tuple[WorkerView, ...]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    return tuple(
        worker(
            name,
            draw(st.sampled_from(SERVING)),
            reported_at=NOW - draw(st.sampled_from([0.0, SILENT_AFTER_S + 1])),
            cluster=draw(st.sampled_from(["east", "west"])),
            model=draw(st.sampled_from(["m", "m", "m", "n"])),
            layout=draw(st.sampled_from([LAYOUTS[0], LAYOUTS[0], LAYOUTS[1]])),
            prefill_active=draw(st.integers(0, 5)),
            decode_running=draw(st.integers(0, 9)),
            blocks_free=draw(st.integers(0, 512)),
            draining=draw(st.booleans()),
            decode_in_flight=draw(st.integers(0, 3)),
        )
        for name in names
    )


@st.composite
def queries(draw: st.DrawFn) -> RouteQuery:
    return query(
        draw(st.integers(1, 5000)),
        placement=draw(st.sampled_from(Placement)),
        avoid=draw(st.sets(st.sampled_from(NAMES))),
    )


matches_maps = st.none() | st.dictionaries(
    st.sampled_from([WorkerId(name) for name in NAMES]), st.integers(1, 400)
)
policies = st.sampled_from(list(POLICIES.values()))


def decide(
    seen: tuple[WorkerView, ...],
    asked: RouteQuery,
    matches: dict[WorkerId, int] | None,
    policy: RoutePolicy,
    seed: int = 0,
) -> RoutePlan | Refusal:
    view = FleetView(seen, version=1, num_routes=seed)
    return plan_route(view, asked, matches, NOW, random.Random(seed), policy)


@given(workers(), queries(), matches_maps, policies)
def test_every_outcome_has_a_reason_and_only_able_workers(
    seen: tuple[WorkerView, ...],
    asked: RouteQuery,
    matches: dict[WorkerId, int] | None,
    policy: RoutePolicy,
) -> None:
    outcome = decide(seen, asked, matches, policy)
    by_id = {each.worker_id: each for each in seen}
    able = {
        name
        for name, each in by_id.items()
        if each.info.model == asked.model
        and not each.load.draining
        and each.info.max_model_len >= asked.num_tokens
    }
    if isinstance(outcome, Refusal):
        assert outcome.message
        assert outcome.reason in {RefusalReason.NO_WORKERS, RefusalReason.TOO_LONG}
        assert not able or asked.placement is Placement.DISAGGREGATED
        return
    assert outcome.reason
    assert outcome.policy == policy.name
    assert outcome.cache_known == (matches is not None)
    chosen = [each.worker_id for each in (*outcome.prefill, *outcome.decode)]
    assert len(chosen) == len(set(chosen)), "a worker is on one side once"
    assert set(chosen) <= able
    assert asked.placement in {Placement.AUTO, outcome.placement}
    if outcome.placement is Placement.AGGREGATED:
        names_few = outcome.cause in {RouteCause.SHORT_PROMPT, RouteCause.HELP}
        assert names_few or set(chosen) == able, "all are fallbacks"
        assert not outcome.decode
    else:
        layouts = {by_id[name].info.layout for name in chosen}
        assert len(layouts) == 1
        one_layout = {name for name in able if by_id[name].info.layout in layouts}
        # A policy that estimates first tokens leaves out who would be much later.
        leaves_out = policy.first_token is not None
        assert leaves_out or set(chosen) == one_layout, "all are fallbacks"
        assert outcome.prefill
        assert outcome.decode


@given(workers(), queries(), matches_maps, policies)
def test_avoided_workers_are_last_on_their_side(
    seen: tuple[WorkerView, ...],
    asked: RouteQuery,
    matches: dict[WorkerId, int] | None,
    policy: RoutePolicy,
) -> None:
    outcome = decide(seen, asked, matches, policy)
    if isinstance(outcome, RoutePlan):
        for side in (outcome.prefill, outcome.decode):
            avoided = [candidate.worker_id in asked.avoid for candidate in side]
            assert avoided == sorted(avoided)


@given(workers(), queries(), matches_maps, policies, st.integers(0, 9), st.randoms())
def test_same_seed_same_plan_in_any_order_of_the_view(
    seen: tuple[WorkerView, ...],
    asked: RouteQuery,
    matches: dict[WorkerId, int] | None,
    policy: RoutePolicy,
    seed: int,
    shuffler: random.Random,
) -> None:
    shuffled = list(seen)
    shuffler.shuffle(shuffled)
    assert decide(tuple(shuffled), asked, matches, policy, seed) == decide(
        seen, asked, matches, policy, seed
    )
    reseeded = decide(seen, asked, matches, policy, seed + 1)
    assert type(reseeded) is type(decide(seen, asked, matches, policy, seed))


def test_ties_are_spread_by_the_seed() -> None:
    seen = (*(worker(f"p{i}") for i in range(4)), worker("d", Role.DECODE))
    firsts = set()
    for seed in range(64):
        outcome = decide(seen, query(), {}, POLICIES["cache_load"], seed)
        assert isinstance(outcome, RoutePlan)
        firsts.add(outcome.prefill[0].worker_id)
    assert firsts == {"p0", "p1", "p2", "p3"}
