from __future__ import annotations

from kvmesh.core.types import (
    Placement,
    Refusal,
    RefusalReason,
    RequestId,
    Role,
    RouteCause,
    RoutePlan,
    WorkerId,
)
from kvmesh.policy.composition import (
    COMPOSITIONS,
    DEFAULT,
    decide_route,
    request_rng,
)
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.ranking import AGGREGATE_TOKENS
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import NOW, fleet, query, worker

P, D = worker("p"), worker("d", Role.DECODE)
BLOCK = 16


def decide(
    view: FleetView,
    num_tokens: int = 320,
    policy: str = DEFAULT,
    held: dict[str, int] | None = None,
    offload: OffloadState | None = None,
    **changes: object,
) -> RoutePlan:
    matches = {WorkerId(name): blocks for name, blocks in (held or {}).items()}
    made = decide_route(
        COMPOSITIONS[policy],
        view,
        query(num_tokens, **changes),
        matches,
        NOW,
        offload or OffloadState(),
    )
    assert isinstance(made.route, RoutePlan), made.route
    return made.route


def first(plan: RoutePlan) -> str:
    return plan.prefill[0].worker_id


def test_names_are_their_keys() -> None:
    assert all(name == each.name for name, each in COMPOSITIONS.items())


class TestShortPrompt:
    def test_runs_where_it_is_decoded(self) -> None:
        plan = decide(fleet(P, D), AGGREGATE_TOKENS)
        assert plan.placement is Placement.AGGREGATED
        assert (first(plan), plan.cause) == ("d", RouteCause.SHORT_PROMPT)

    def test_a_token_more_keeps_them_apart(self) -> None:
        plan = decide(fleet(P, D), AGGREGATE_TOKENS + 1)
        assert plan.placement is Placement.DISAGGREGATED
        assert plan.cause is RouteCause.LOAD

    def test_only_what_is_not_cached_counts(self) -> None:
        """A follow-up goes back to the worker that generated the answer before it."""
        two = fleet(P, D, worker("e", Role.DECODE))
        plan = decide(two, 4000, held={"e": 240, "p": 100})
        assert plan.placement is Placement.AGGREGATED
        assert [each.worker_id for each in plan.prefill] == ["e"]

    def test_busy_decode_workers_are_left_to_decode(self) -> None:
        for busy in (
            worker("d", Role.DECODE, decode_running=5),
            worker("d", Role.DECODE, prefill_active=1),
            worker("d", Role.DECODE, blocks_free=100),
            worker("d", Role.DECODE, reported_at=NOW - 9),
        ):
            assert decide(fleet(P, busy), 64).placement is Placement.DISAGGREGATED

    def test_avoided_worker_is_not_asked_again(self) -> None:
        plan = decide(fleet(P, D), 64, avoid={"d"})
        assert plan.placement is Placement.DISAGGREGATED

    def test_baselines_keep_prompts_away_from_decode_workers(self) -> None:
        ours = COMPOSITIONS[DEFAULT].route
        baselines = [name for name, each in COMPOSITIONS.items() if each.route is not ours]
        assert len(baselines) > 8
        for name in baselines:
            assert decide(fleet(P, D), 16, name).placement is Placement.DISAGGREGATED

    def test_what_is_asked_for_holds(self) -> None:
        plan = decide(fleet(P, D), 16, placement=Placement.DISAGGREGATED)
        assert plan.placement is Placement.DISAGGREGATED


class TestCause:
    def test_prefix_only_where_the_policy_reads_it(self) -> None:
        held = {"p": 10}
        assert decide(fleet(P, D), 320, held=held).cause is RouteCause.PREFIX
        assert decide(fleet(P, D), 320, "forwarding", held=held).cause is RouteCause.LOAD
        assert decide(fleet(P, D), 320, "round_robin", held=held).cause is RouteCause.ROTATION

    def test_asked_and_no_pair(self) -> None:
        asked = decide(fleet(P, D), placement=Placement.AGGREGATED)
        assert asked.cause is RouteCause.ASKED
        assert decide(fleet(P)).cause is RouteCause.NO_PAIR


class TestOffload:
    def test_cluster_by_threshold(self) -> None:
        two = fleet(worker("far", cluster="west"), P, D)
        offload = OffloadState("west", 1000)
        plan = decide(two, 1500, offload=offload)
        assert (first(plan), plan.cause) == ("far", RouteCause.LONG_PROMPT)
        assert plan.remote
        plan = decide(two, 900, offload=offload)
        assert (first(plan), plan.cause) == ("p", RouteCause.LOAD)
        assert not plan.remote

    def test_remote_cluster_that_drains(self) -> None:
        two = fleet(worker("far", cluster="west", draining=True), P, D)
        plan = decide(two, 1500, offload=OffloadState("west", 1000))
        assert (first(plan), plan.cause) == ("p", RouteCause.REMOTE_DOWN)
        assert not plan.remote


def test_refusal_has_its_reason() -> None:
    made = decide_route(COMPOSITIONS[DEFAULT], fleet(), query(), {}, NOW, OffloadState())
    assert isinstance(made.route, Refusal)
    assert made.route.reason is RefusalReason.NO_WORKERS


def test_ties_fall_alike_for_one_request_and_differ_between_requests() -> None:
    alike: list[WorkerView] = [worker(f"p{n}") for n in range(8)]
    chosen = {
        name: {first(decide(fleet(*alike, D), request_id=RequestId(name))) for _ in range(3)}
        for name in ("a", "b", "c", "e", "f", "g")
    }
    assert all(len(each) == 1 for each in chosen.values())
    assert len(set.union(*chosen.values())) > 1
    assert request_rng(RequestId("a")).random() == request_rng(RequestId("a")).random()
