"""What an index shortlists decides as the whole fleet does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.types import Candidate, Refusal, Role, RoutePlan, RouteQuery, WorkerId
from kvmesh.policy.fleet_index import WIDTH, FleetIndex
from kvmesh.policy.ranking import Rank, RoutePolicy, Standing
from kvmesh.policy.routing import plan_route
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import NOW, POLICIES, query, worker

NAMES = [WorkerId(f"w{i:02}") for i in range(40)]


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerView]:
    """Up to forty workers; slots are alike, so that load alone orders them."""
    roles = draw(st.sampled_from([(Role.PREFILL, Role.DECODE), (Role.HYBRID,)]))
    count = draw(st.integers(1, len(NAMES)))
    numbers = random.Random(draw(st.integers(0, 10**6)))
    return [
        dataclasses.replace(
            one(name, roles, numbers), pending_tokens=numbers.choice([0, 300, 3000, 9000])
        )
        for name in NAMES[:count]
    ]


def one(name: WorkerId, roles: Sequence[Role], numbers: random.Random) -> WorkerView:
    return worker(
        name,
        numbers.choice(roles),
        reported_at=NOW - numbers.choice([0.0, 0.0, 0.0, 9.0]),
        prefill_active=numbers.randrange(6),
        decode_running=numbers.randrange(10),
        blocks_free=numbers.choice([0, 10, 100, 256, 512]),
        draining=numbers.random() < 0.1,
    )


queries = st.builds(
    query,
    st.integers(1, 5000),
    avoid=st.sets(st.sampled_from(NAMES), max_size=5),
)
matches_maps = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 200), max_size=12)


def choice_rank(
    side: tuple[Candidate, ...],
    views: Mapping[WorkerId, WorkerView],
    asked: RouteQuery,
    rank: str,
    policy: RoutePolicy,
) -> tuple[bool, bool, Rank] | None:
    """How good the first candidate is; ties may fall either way."""
    if not side:
        return None
    view = views[side[0].worker_id]
    first = side[0]
    saved = first.saved_tokens
    standing = Standing(view, asked, first.cached_tokens, turn=0, saved_tokens=saved)
    silent = NOW - view.reported_at > SILENT_AFTER_S
    return (view.worker_id in asked.avoid, silent, getattr(policy, rank)(standing))


@settings(max_examples=300)
@given(
    fleets(),
    queries,
    matches_maps,
    st.sampled_from([POLICIES["kvmesh"], POLICIES["cache_load"], POLICIES["least_loaded"]]),
)
def test_the_shortlist_s_choice_is_the_fleet_s(
    workers: list[WorkerView],
    asked: RouteQuery,
    matches: dict[WorkerId, int],
    policy: RoutePolicy,
) -> None:
    index = FleetIndex(random.Random(0), by_tokens=policy.first_token is not None)
    for each in workers:
        index.update(each)
    small = index.shortlist(asked, matches, NOW, SILENT_AFTER_S)
    whole = FleetView(tuple(workers))
    rng = random.Random(1)
    expected = plan_route(whole, asked, matches, NOW, rng, policy)
    got = plan_route(small, asked, matches, NOW, rng, policy)
    if isinstance(expected, Refusal):
        assert got == expected
        return
    assert isinstance(got, RoutePlan)
    assert got.placement is expected.placement
    views = {each.worker_id: each for each in workers}
    sides = ("aggregated",) if not expected.decode else ("prefill", "decode")
    for side in sides:
        name = "prefill" if side == "aggregated" else side
        found = choice_rank(getattr(got, name), views, asked, side, policy)
        best = choice_rank(getattr(expected, name), views, asked, side, policy)
        assert found is not None
        assert best is not None
        if side == "aggregated":
            # Prompts and decode both count there, and a hybrid is listed for one of them.
            assert found[:2] == best[:2]
        else:
            assert found[:2] == best[:2]
            assert found[2] == pytest.approx(best[2])


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 5) | st.none()), max_size=60))
def test_updates_and_removals_keep_the_order(changes: list[tuple[WorkerId, int | None]]) -> None:
    index = FleetIndex(random.Random(0))
    alive: dict[WorkerId, WorkerView] = {}
    for name, load in changes:
        if load is None:
            index.remove(name)
            alive.pop(name, None)
        else:
            alive[name] = worker(name, prefill_active=load)
            index.update(alive[name])
    assert {each.worker_id: each for each in index.view().workers} == alive
    loads = sorted(each.load.prefill_active for each in alive.values())
    listed = index.shortlist(query(), None, NOW, SILENT_AFTER_S).workers
    # Only prefill workers are here, so the list is the least loaded ones.
    assert sorted(each.load.prefill_active for each in listed) == loads[:WIDTH]
