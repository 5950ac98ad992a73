"""Requests that ask at the same time: who computes which prompt, and what stays as it is."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import (
    Placement,
    Refusal,
    RequestId,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.chain import upstream_parts
from kvmesh.policy.composition import COMPOSITIONS, decide_route
from kvmesh.policy.elastic import ElasticReason
from kvmesh.policy.explain import describe_decision
from kvmesh.policy.joint import Ask, decide_jointly, hold_s, in_turn
from kvmesh.policy.joint_choice import JointReason
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import LAYOUT, NOW, fleet, query, worker

JOINT = COMPOSITIONS["joint"]
TOKENLAKE = COMPOSITIONS["tokenlake"]
ALONE = COMPOSITIONS["kvmesh"]
LONG = 1600
BLOCKS = LONG // LAYOUT.block_size
DECODE = worker("d", Role.DECODE, decode_running=5)
"""Too full to help."""
BOTH = fleet(worker("a"), worker("b"), DECODE)


def ask(name: str, view: FleetView = BOTH, num_tokens: int = LONG, **held: Any) -> Ask:
    asked = query(num_tokens, request_id=RequestId(name))
    return Ask(asked, view, {WorkerId(worker_id): blocks for worker_id, blocks in held.items()})


def decide(*asks: Ask, policy: Any = JOINT) -> list[OffloadPlan]:
    return decide_jointly(policy, asks, NOW, OffloadState())


def route(plan: OffloadPlan) -> RoutePlan:
    assert isinstance(plan.route, RoutePlan), plan.route
    return plan.route


def first(plan: OffloadPlan) -> str:
    return route(plan).prefill[0].worker_id


def reasons(plans: list[OffloadPlan]) -> list[JointReason]:
    return [plan.joint.reason for plan in plans if plan.joint is not None]


def one_by_one(*asks: Ask) -> list[str]:
    """Where each goes if its plan is load before the next one is decided on."""
    in_flight: dict[WorkerId, int] = {}
    went: list[str] = []
    for each in asks:
        workers = tuple(
            dataclasses.replace(
                one, prefill_in_flight=one.prefill_in_flight + in_flight.get(one.worker_id, 0)
            )
            for one in each.view.workers
        )
        view = dataclasses.replace(each.view, workers=workers)
        plan = decide_route(ALONE, view, each.query, each.matches, NOW, OffloadState())
        went.append(first(plan))
        in_flight[WorkerId(went[-1])] = in_flight.get(WorkerId(went[-1]), 0) + 1
    return went


def name_that_prefers(worker_id: str, **held: Any) -> str:
    """A request's name decides its ties: one of those that go to this worker."""
    names = (f"r{number}" for number in range(100))
    return next(name for name in names if first(decide(ask(name, **held))[0]) == worker_id)


def test_a_lone_request_is_decided_as_ever() -> None:
    lone = ask("x", a=50)
    (plan,) = decide(lone)
    alone = decide_route(ALONE, lone.view, lone.query, lone.matches, NOW, OffloadState())
    assert plan.route == alone.route
    assert reasons([plan]) == [JointReason.ALONE]


def test_who_may_go_elsewhere_makes_room_for_who_may_not() -> None:
    """One by one the first takes the worker that alone has the second's prefix; together nothing
    has to move.
    """
    either: dict[str, Any] = {"a": 90, "b": 90}
    asks = (ask(name_that_prefers("a", **either), **either), ask("z", a=90))
    went = one_by_one(*asks)
    assert went == ["a", "b"]
    plans = decide(*asks)
    assert [first(plan) for plan in plans] == ["b", "a"]
    assert reasons(plans) == [JointReason.MOVED, JointReason.MOVED]
    assert all(route(plan).cause is RouteCause.PREFIX for plan in plans)
    assert all(route(plan).prefill[0].source is None for plan in plans)
    brought = [plan.joint.brought_tokens for plan in plans if plan.joint is not None]
    assert brought == [0, 0]
    assert plans[0].joint is not None
    assert plans[0].joint.saved_tokens > 0
    assert "prefill on b with 1440 of 1600 tokens cached" in route(plans[0]).reason


def test_what_would_not_be_better_stays() -> None:
    plans = decide(ask("x", a=90), ask("y", b=90))
    assert [first(plan) for plan in plans] == ["a", "b"]
    assert reasons(plans) == [JointReason.KEPT, JointReason.KEPT]


def test_load_outweighs_volume() -> None:
    """Both prefixes lie on `a`, but two prompts of 800 tokens are later there than one each."""
    half = BLOCKS // 2
    plans = decide(ask("x", a=half), ask("y", a=half))
    assert sorted(first(plan) for plan in plans) == ["a", "b"]
    fetching = next(plan for plan in plans if first(plan) == "b")
    source = route(fetching).prefill[0].source
    assert source is not None
    assert source.worker_id == "a"
    assert route(fetching).cause is RouteCause.FETCH
    assert "fetches up to 800 from a" in route(fetching).reason
    assert fetching.joint is not None
    assert fetching.joint.brought_tokens == 800


def test_the_shortest_prompt_of_a_worker_is_told_first() -> None:
    only = fleet(worker("a"), DECODE)
    asks = (ask("x", only, 3200), ask("y", only, 800), ask("z", only, 1600))
    plans = decide(*asks)
    told = [each.query.request_id for each, _ in in_turn(asks, plans)]
    assert told == ["y", "z", "x"]
    assert [plan.joint.turn for plan in plans if plan.joint is not None] == [2, 0, 1]


def test_prompts_on_decode_workers_are_not_divided_anew() -> None:
    idle = fleet(worker("a"), worker("b"), worker("e", Role.DECODE))
    plans = decide(ask("x", idle, 64), ask("y", idle, 3200))
    assert route(plans[0]).placement is Placement.AGGREGATED
    assert reasons(plans) == [JointReason.FIXED, JointReason.KEPT]


def test_a_refusal_beside_a_plan() -> None:
    plans = decide(ask("x"), ask("y", num_tokens=100_000))
    assert isinstance(plans[1].route, Refusal)
    assert reasons(plans) == [JointReason.KEPT, JointReason.FIXED]


def test_nobody_is_sent_to_a_worker_that_it_avoids_or_that_is_silent() -> None:
    late = fleet(worker("a"), worker("b", reported_at=NOW - 60), DECODE)
    plans = decide(ask("x", late), ask("y", late))
    assert [first(plan) for plan in plans] == ["a", "a"]
    assert [each.worker_id for each in route(plans[0]).prefill][-1] == "b", "a last resort"
    avoiding = dataclasses.replace(
        ask("x"), query=query(LONG, request_id=RequestId("x"), avoid=["a"])
    )
    plans = decide(avoiding, ask("y"))
    assert [first(plan) for plan in plans] == ["b", "a"]


def test_workers_that_are_much_later_are_not_asked() -> None:
    far = dataclasses.replace(worker("b"), pending_tokens=9000)
    view = fleet(worker("a"), far, DECODE)
    for plan in decide(ask("x", view), ask("y", view)):
        assert [each.worker_id for each in route(plan).prefill] == ["a"]


def test_nor_are_those_of_another_cluster() -> None:
    """A worker with room there would take the prompt, and be late with it and far away."""
    late = dataclasses.replace(worker("w", cluster="west"), pending_tokens=90_000)
    soon = worker("s", cluster="west")
    view = fleet(worker("a"), late, soon, DECODE)
    asks = [ask(name, view, a=90) for name in "xy"]
    for each, plan in zip(asks, decide(*asks), strict=True):
        alone = decide_route(ALONE, each.view, each.query, each.matches, NOW, OffloadState())
        assert isinstance(alone.route, RoutePlan)
        names = [one.worker_id for one in route(plan).prefill]
        assert names == [one.worker_id for one in alone.route.prefill] == ["a", "s"]


def test_a_worker_without_a_slot_is_later_by_the_wait_for_one() -> None:
    full = dataclasses.replace(worker("b", prefill_active=4), pending_tokens=1000)
    view = fleet(worker("a"), full, DECODE)
    for plan in decide(ask("x", view, 160), ask("y", view, 160)):
        assert [each.worker_id for each in route(plan).prefill] == ["a"]


def test_each_gets_decode_room_of_its_own() -> None:
    """What was just reserved counts in blocks, too."""
    small = [worker(name, Role.DECODE, num_blocks=150, decode_slots=4) for name in ("d", "e")]
    view = fleet(worker("a"), worker("b"), *small)
    plans = decide(ask("x", view), ask("y", view))
    assert len({route(plan).decode[0].worker_id for plan in plans}) == 2


def test_later_ones_know_the_load_of_those_before_them() -> None:
    """By its slots one has room for all; its blocks are gone after two."""
    sizes: dict[str, Any] = {"num_blocks": 220, "decode_slots": 40}
    fewer = worker("d", Role.DECODE, decode_running=25, **sizes)
    more = worker("e", Role.DECODE, decode_running=30, **sizes)
    plans = decide(*(ask(name, fleet(worker("a"), fewer, more)) for name in "xyz"))
    chosen = [route(plan).decode[0].worker_id for plan in plans]
    assert (chosen[0], chosen[-1]) == ("d", "e")


def test_tokenlake_moves_least_whatever_waits() -> None:
    busy = dataclasses.replace(worker("a"), pending_tokens=1500)
    view = fleet(busy, worker("b"), DECODE)
    plans = decide(ask("x", view, a=90), ask("y", view, b=40), policy=TOKENLAKE)
    assert [first(plan) for plan in plans] == ["a", "b"]


LAYERED = dataclasses.replace(LAYOUT, num_layers=12)
SHAPE: dict[str, Any] = {
    "layout": LAYERED,
    "pair_share": 2e-4,
    "num_blocks": 4096,
    "max_model_len": 65_536,
}
LONGER = 16_384


def chainable(num_prefill: int) -> FleetView:
    """Workers that may compute a prompt together."""
    prefill = [worker(f"p{number}", **SHAPE) for number in range(num_prefill)]
    return fleet(*prefill, worker("d", Role.DECODE, decode_running=5, **SHAPE))


def parts(plan: OffloadPlan) -> list[str]:
    """Who computes a prompt, from its beginning on."""
    upstream = upstream_parts(route(plan).prefill[0].source)
    return [*(each.worker_id for each in upstream), first(plan)]


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5])
def test_tokenlake_divides_idle_workers_among_prompts(num_workers: int) -> None:
    view = chainable(num_workers)
    plans = decide(ask("x", view, LONGER), ask("y", view, LONGER), policy=TOKENLAKE)
    used = [name for plan in plans for name in parts(plan)]
    assert len(used) == len(set(used)) == num_workers, "each has one prompt or a part of it"
    for plan in plans:
        assert plan.joint is not None
        assert plan.joint.degree == len(parts(plan))
        assert (plan.joint.num_batched, plan.joint.elastic) == (1, ElasticReason.WITHIN_SLO)
        cause = RouteCause.CHAIN if plan.joint.degree > 1 else RouteCause.LOAD
        assert route(plan).cause is cause
        assert route(plan).reason.endswith(
            f"batched on {len(parts(plan))} workers, within_slo"
        ) or (route(plan).reason.endswith("batched on 1 worker, within_slo"))
    facts = describe_decision(view, query(LONGER), plans[0], TOKENLAKE.route, OffloadState())
    assert facts.degree == len(parts(plans[0]))
    assert (facts.num_batched, facts.elastic_reason) == (1, ElasticReason.WITHIN_SLO)


def test_tokenlake_lets_short_prompts_share_a_worker_and_long_ones_have_several() -> None:
    view = chainable(3)
    asks = [ask("x", view, LONGER), *(ask(name, view, 600) for name in "abcd")]
    plans = decide(*asks, policy=TOKENLAKE)
    assert len(parts(plans[0])) == 2
    assert {len(parts(plan)) for plan in plans[1:]} == {1}
    assert not {first(plan) for plan in plans[1:]} & set(parts(plans[0]))
    assert "batched with 3 others on 1 worker" in route(plans[1]).reason


def test_tokenlake_drops_limits_that_cannot_be_kept() -> None:
    view = dataclasses.replace(chainable(2), pace=FetchPace(token_s=1e-3))
    late = [
        Ask(query(LONGER, request_id=RequestId(name), ttft_budget_ms=10), view, {}) for name in "xy"
    ]
    for plan in decide(*late, policy=TOKENLAKE):
        assert plan.joint is not None
        assert plan.joint.elastic is ElasticReason.BEST_EFFORT
        assert isinstance(plan.route, RoutePlan)


def test_tokenlake_gives_no_part_to_a_worker_with_a_prompt() -> None:
    view = chainable(3)
    busy = dataclasses.replace(view.workers[0], pending_tokens=300, prefill_in_flight=1)
    view = dataclasses.replace(view, workers=(busy, *view.workers[1:]))
    plans = decide(ask("x", view, LONGER), ask("y", view, 300), policy=TOKENLAKE)
    assert "p0" not in parts(plans[0])[:-1]


def test_it_is_said_what_became_of_it() -> None:
    asks = (ask("x", a=90), ask("y", a=90))
    for each, plan in zip(asks, decide(*asks), strict=True):
        facts = describe_decision(each.view, each.query, plan, JOINT.route, OffloadState())
        assert plan.joint is not None
        assert facts.joint_reason is plan.joint.reason
        assert (facts.num_asked, facts.turn) == (2, plan.joint.turn)
        assert facts.brought_tokens == plan.joint.brought_tokens
        assert facts.prefill[0].fetch in {each.value for each in FetchReason}


@pytest.mark.parametrize("seed", range(8))
def test_no_plan_breaks_a_rule_of_routes(seed: int) -> None:
    draw = random.Random(seed)
    workers: list[WorkerView] = [
        dataclasses.replace(worker(f"p{n}", cluster=draw.choice(("east", "west"))))
        for n in range(4)
    ]
    workers = [
        dataclasses.replace(each, pending_tokens=draw.randrange(0, 4000, 400)) for each in workers
    ]
    workers += [worker(f"d{n}", Role.DECODE, decode_running=draw.randrange(9)) for n in range(2)]
    view = fleet(*workers)
    asks = []
    for number in range(6):
        held = {f"p{draw.randrange(4)}": draw.randrange(0, 90) for _ in range(2)}
        asks.append(ask(f"r{number}", view, draw.randrange(100, 3000), **held))
    for policy in (JOINT, TOKENLAKE):
        plans = decide(*asks, policy=policy)
        assert plans == decide(*asks, policy=policy), "equal arguments, equal decisions"
        for each in map(route, plans):
            names = [one.worker_id for one in each.prefill]
            assert len(names) == len(set(names))
            assert not set(names) & {one.worker_id for one in each.decode}


class TestHold:
    def asked(self, *workers: WorkerView, **changes: Any) -> float:
        asked: RouteQuery = query(**{"num_tokens": LONG, **changes})
        return hold_s(JOINT, Ask(asked, fleet(*workers), {}), NOW, OffloadState())

    def test_only_while_nobody_is_idle(self) -> None:
        busy = worker("a", prefill_active=1)
        assert self.asked(busy, worker("b"), DECODE) == 0.0
        assert self.asked(busy, worker("b", prefill_active=1), DECODE) == 0.02

    def test_no_longer_than_until_somebody_is_idle(self) -> None:
        soon = worker("a", prefill_active=1)
        soon = dataclasses.replace(soon, pending_tokens=100)
        late = dataclasses.replace(worker("b", prefill_active=1), pending_tokens=900)
        view = dataclasses.replace(fleet(soon, late, DECODE), pace=FetchPace(token_s=1e-4))
        held = hold_s(JOINT, Ask(query(LONG), view, {}), NOW, OffloadState())
        assert held == pytest.approx(0.01), "the first one has computed what it has"
        view = dataclasses.replace(view, pace=FetchPace(token_s=1e-2))
        assert hold_s(JOINT, Ask(query(LONG), view, {}), NOW, OffloadState()) == 0.02

    def test_nobody_waits_for_who_is_not_there(self) -> None:
        assert self.asked(DECODE) == 0.0
        assert self.asked(worker("a", prefill_active=1), model="other") == 0.0
        leaving = worker("b", draining=True)
        assert self.asked(worker("a", prefill_active=1), leaving, DECODE) == 0.02

    def test_nor_for_what_others_do_not_change(self) -> None:
        busy = worker("a", prefill_active=1)
        idle = worker("d", Role.DECODE)
        assert self.asked(busy, DECODE) == 0.02
        assert self.asked(busy, idle, num_tokens=64) == 0.0, "a short prompt, where it is decoded"
        assert self.asked(busy, DECODE, placement=Placement.AGGREGATED) == 0.0
        assert self.asked(worker("h", Role.HYBRID, prefill_active=1)) == 0.0
        assert self.asked(busy, DECODE, num_tokens=100_000) == 0.0, "a refusal"
