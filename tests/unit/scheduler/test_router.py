from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY

from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import (
    BlockHash,
    Placement,
    Refusal,
    RefusalReason,
    RequestId,
    Role,
    RoutePlan,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.policy import gathering
from kvmesh.policy.joint_choice import JointReason
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.telemetry import tracing
from kvmesh.telemetry.sdk_spans import SdkSpans
from services.scheduler.fleet import Fleet, Membership
from services.scheduler.router import Router
from tests.unit.policy.fleet_examples import LAYOUT, query, worker_info
from tests.unit.scheduler.parts import Parts

HASHES = (BlockHash(bytes(16)),)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True)
class Answer:
    matches: tuple[PrefixMatch, ...]
    known: bool = True
    why: str = "late"


class Prefixes:
    """Answers by namespace and remembers what it was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, float]] = []

    async def match(self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float) -> Answer:
        self.asked.append((namespace, timeout_s))
        return self.answers[namespace]


def make_router(fleet: Fleet, prefixes: Prefixes | None = None) -> Router:
    return Parts(fleet, prefixes).router


def fleet_of(*infos: WorkerInfo) -> Fleet:
    fleet = Fleet(3.0)
    for info in infos:
        fleet.register(info, 0.0)
    return fleet


def count(outcome: str, placement: str) -> float:
    labels = {"outcome": outcome, "placement": placement}
    return REGISTRY.get_sample_value("kvmesh_scheduler_routes_total", labels) or 0.0


async def test_every_namespace_of_the_model_is_asked() -> None:
    other = worker_info("h2", Role.HYBRID, layout=type(LAYOUT)("new", "float32", 16, 2, 2, 32))
    fleet = fleet_of(worker_info("h1", Role.HYBRID), other, worker_info("x", model="n"))
    prefixes = Prefixes(
        fingerprint=Answer(()),
        new=Answer((PrefixMatch(WorkerId("h2"), 1, "east", 7),)),
    )
    plan = await make_router(fleet, prefixes).route(query(block_hashes=HASHES), "")
    assert isinstance(plan, RoutePlan)
    assert plan.cache_known
    assert plan.prefill[0].worker_id == "h2"
    assert plan.prefill[0].cached_tokens == 7 * 16
    assert prefixes.asked == [("fingerprint", 0.05), ("new", 0.05)]


async def test_what_nobody_publishes_is_not_looked_up() -> None:
    prefixes = Prefixes()
    alone = [replace(worker_info(name), publishes=False) for name in ("a", "b")]
    plan = await make_router(fleet_of(*alone), prefixes).route(query(block_hashes=HASHES), "")
    assert isinstance(plan, RoutePlan)
    assert plan.cache_known
    assert prefixes.asked == []


async def test_unknown_matches_make_a_plan_without_cache_knowledge() -> None:
    fleet = fleet_of(worker_info("h1", Role.HYBRID))
    prefixes = Prefixes(fingerprint=Answer((), known=False))
    plan = await make_router(fleet, prefixes).route(query(block_hashes=HASHES), "")
    assert isinstance(plan, RoutePlan)
    assert not plan.cache_known


async def test_outcomes_are_counted() -> None:
    plans, refusals = count("plan", "aggregated"), count("no_workers", "auto")
    await make_router(fleet_of(worker_info("h", Role.HYBRID))).route(query(), "")
    outcome = await make_router(fleet_of()).route(query(), "")
    assert isinstance(outcome, Refusal)
    assert count("plan", "aggregated") == plans + 1
    assert count("no_workers", "auto") == refusals + 1


async def test_span_is_a_child_of_the_query_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    # The global provider may be set once per process, and spans do not come from it.
    monkeypatch.setattr("kvmesh.telemetry.sdk_spans.trace.set_tracer_provider", lambda _: None)
    installed = SdkSpans("test", SimpleSpanProcessor(exporter), tracing.Allowance())
    monkeypatch.setattr(tracing, "_installed", [installed])
    fleet = fleet_of(worker_info("h", Role.HYBRID))
    plan = await make_router(fleet).route(query(), TRACEPARENT)
    assert isinstance(plan, RoutePlan)
    (span,) = exporter.get_finished_spans()
    assert span.name == "scheduler.route"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" in TRACEPARENT
    assert span.attributes is not None
    assert span.attributes["reason"] == plan.reason
    installed.close()


async def test_every_decision_is_kept_with_its_numbers() -> None:
    parts = Parts(fleet_of(worker_info("p"), worker_info("d", Role.DECODE)))
    router, decisions = parts.router, parts.decisions
    plan = await router.route(query(64, request_id=RequestId("short")), "")
    assert isinstance(plan, RoutePlan)
    await router.route(query(9000, request_id=RequestId("long")), "")
    refused, short = decisions.routes()
    assert (refused.request_id, refused.reason) == ("long", "too_long")
    assert (short.request_id, short.reason) == ("short", plan.cause.value)
    assert short.prefill[0].worker_id == plan.prefill[0].worker_id


async def median_decision_s(num_workers: int) -> float:
    """CPU time of a route in a fleet of mixed load, reports in between included."""
    numbers = random.Random(0)
    fleet = Fleet(1e9)
    members = []
    for number in range(num_workers):
        role = Role.DECODE if number % 2 else Role.PREFILL
        joined = fleet.register(worker_info(f"w{number:04}", role), 0.0)
        assert isinstance(joined, Membership)
        members.append(joined)
    held = tuple(
        PrefixMatch(WorkerId(f"w{n:04}"), 1, "east", 1 + n % 20) for n in range(0, num_workers, 10)
    )
    parts = Parts(fleet, Prefixes(fingerprint=Answer(held)))
    clock, router = parts.clock, parts.router
    taken: list[float] = []
    for number in range(200):
        clock.advance(0.005)
        for member in numbers.sample(members, 5):
            load = WorkerLoad(
                prefill_active=numbers.randrange(5),
                decode_running=numbers.randrange(9),
                blocks_free=512,
            )
            assert fleet.report(member, load, clock.now())
        asked = query(320, block_hashes=HASHES, request_id=RequestId(str(number)))
        begun = time.process_time()
        assert isinstance(await router.route(asked, ""), RoutePlan)
        taken.append(time.process_time() - begun)
    return sorted(taken)[len(taken) // 2]


async def test_a_thousand_workers_cost_a_route_little_more_than_forty() -> None:
    """A ratio, since a busy machine slows both. Looking at all would cost 25 times as much."""
    few, many = await median_decision_s(40), await median_decision_s(1000)
    assert many < 5 * few
    assert many < 0.05


async def test_workers_without_the_adapter_come_last_and_are_not_blamed() -> None:
    parts = Parts()
    blamed: list[frozenset[WorkerId]] = []
    parts.planner.on_query = lambda query, _now: blamed.append(query.avoid)
    having = {Role.PREFILL: "p2", Role.DECODE: "d1"}
    for role, names in ((Role.PREFILL, ("p1", "p2", "p3")), (Role.DECODE, ("d1", "d2"))):
        for name in names:
            adapters = ("sql@1",) if having[role] == name else ("sql@0",)
            parts.fleet.register(worker_info(name, role, adapters=adapters), 0.0)
    for number in range(6):
        asked = query(
            request_id=RequestId(f"r{number}"),
            placement=Placement.DISAGGREGATED,
            adapter="sql@1",
        )
        plan = await parts.router.route(asked, "")
        assert isinstance(plan, RoutePlan)
        assert (plan.prefill[0].worker_id, plan.decode[0].worker_id) == ("p2", "d1")
    assert set(blamed) == {frozenset()}


async def test_who_asks_again_is_no_load_of_its_own_and_counts_once() -> None:
    parts = Parts(fleet_of(worker_info("h1", Role.HYBRID), worker_info("h2", Role.HYBRID)))
    for _ in range(3):
        assert isinstance(await parts.router.route(query(), ""), RoutePlan)
        counted = [each.prefill_in_flight for each in parts.fleet.view(0.0).workers]
        assert sum(counted) == 1
    assert isinstance(await parts.router.route(query(10**9), ""), Refusal)
    assert not any(each.prefill_in_flight for each in parts.fleet.view(0.0).workers)


class SlowPrefixes:
    """Answers when all who are expected have asked."""

    def __init__(self, count: int, **answers: Answer) -> None:
        self.answers = answers
        self.barrier = asyncio.Barrier(count)

    async def match(self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float) -> Answer:
        await self.barrier.wait()
        return self.answers[namespace]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, nobody gives up waiting for a lookup."""
    monkeypatch.setattr(gathering, "LOOKUP_S", 3600.0)


@pytest.mark.usefixtures("patient")
async def test_queries_that_come_together_are_decided_together() -> None:
    infos = [worker_info("a"), worker_info("b"), worker_info("d", Role.DECODE, decode_slots=2)]
    held = Answer((PrefixMatch(WorkerId("a"), 1, "east", 90),))
    parts = Parts(fleet_of(*infos), SlowPrefixes(3, fingerprint=held), policy="joint")
    before = joint_count("kept"), joint_count("alone")
    asked = [query(1600, request_id=RequestId(name), block_hashes=HASHES) for name in "xyz"]
    plans = await asyncio.gather(*(parts.router.route(each, "") for each in asked))
    assert all(isinstance(plan, RoutePlan) for plan in plans)
    assert parts.router.num_waiting == 0
    facts = list(parts.decisions.routes())
    assert {each.num_asked for each in facts} == {3}
    assert {each.joint_reason for each in facts} <= {JointReason.KEPT, JointReason.MOVED}
    assert joint_count("kept") > before[0]
    assert joint_count("alone") == before[1]
    shown = parts.decisions.as_json()["routes"][0]
    assert shown["joint_reason"] in {"kept", "moved"}
    prefill = [plan.prefill[0].worker_id for plan in plans if isinstance(plan, RoutePlan)]
    loads = {each.worker_id: each for each in parts.fleet.view(parts.clock.now()).workers}
    assert {name: prefill.count(name) for name in set(prefill)} == {
        name: loads[name].prefill_in_flight for name in set(prefill)
    }


async def test_a_query_alone_is_decided_alone_also_by_a_joint_policy() -> None:
    parts = Parts(fleet_of(worker_info("a"), worker_info("d", Role.DECODE)), policy="joint")
    before = joint_count("alone")
    assert isinstance(await parts.router.route(query(1600), ""), RoutePlan)
    assert joint_count("alone") == before + 1
    (facts,) = parts.decisions.routes()
    assert (facts.joint_reason, facts.num_asked) == (JointReason.ALONE, 1)


@pytest.mark.usefixtures("patient")
async def test_a_division_by_volume_may_be_later_than_one_by_one() -> None:
    """The first goes to its prefix behind a queue, and the second is alone on the other worker."""
    fleet = fleet_of(worker_info("b"))
    queue = WorkerLoad(prefill_active=1, pending_tokens=2000, blocks_free=512)
    helps_nobody = WorkerLoad(decode_running=5, blocks_free=512)
    for info, load in (
        (worker_info("a"), queue),
        (worker_info("d", Role.DECODE), helps_nobody),
    ):
        member = fleet.register(info, 0.0)
        assert isinstance(member, Membership)
        fleet.report(member, load, 0.0)
    found = SlowPrefixes(2, fingerprint=Answer((PrefixMatch(WorkerId("a"), 1, "east", 30),)))
    parts = Parts(fleet, found, policy="tokenlake")
    asked = [query(1600, request_id=RequestId(name), block_hashes=HASHES) for name in "xy"]
    asked[1] = replace(asked[1], avoid=frozenset([WorkerId("a")]))
    plans = await asyncio.gather(*(parts.router.route(each, "") for each in asked))
    first = [plan.prefill[0].worker_id for plan in plans if isinstance(plan, RoutePlan)]
    assert first == ["a", "b"]
    assert {each.num_asked for each in parts.decisions.routes()} == {2}


class StuckPrefixes(Prefixes):
    """Does not answer for one namespace until it may."""

    def __init__(self, stuck: str, **answers: Answer) -> None:
        super().__init__(**answers)
        self.stuck = stuck
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def match(self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float) -> Answer:
        if namespace == self.stuck:
            self.is_asked.set()
            await self.may_answer.wait()
        return await super().match(namespace, hashes, timeout_s)


async def test_a_query_does_not_wait_for_lookups_of_another_model() -> None:
    other = worker_info("b", model="n", layout=type(LAYOUT)("new", "float32", 16, 2, 2, 32))
    prefixes = StuckPrefixes("new", new=Answer(()), fingerprint=Answer(()))
    parts = Parts(fleet_of(worker_info("a"), other), prefixes, policy="joint")
    policy = replace(parts.settings.policy, joint_window_s=3600.0)
    parts.use(replace(parts.settings, policy=policy))
    stuck = asyncio.create_task(parts.router.route(query(model="n", block_hashes=HASHES), ""))
    await prefixes.is_asked.wait()
    assert isinstance(await parts.router.route(query(block_hashes=HASHES), ""), RoutePlan)
    assert parts.router.num_waiting == 1
    stuck.cancel()
    await asyncio.wait({stuck})
    assert parts.router.num_waiting == 0


def joint_count(reason: str) -> float:
    name = "kvmesh_scheduler_joint_requests_total"
    return REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0


async def test_prompts_that_would_be_late_give_way_though_no_prefix_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = Fleet(3.0)
    infos = [worker_info("p0"), worker_info("p1"), worker_info("d0", Role.DECODE)]
    members = [fleet.register(info, 0.0) for info in infos]
    parts = Parts(fleet)
    monkeypatch.setattr(parts.planner, "pace", lambda _model: FetchPace(token_s=0.001))
    asked = query(3000, ttft_budget_ms=2000)
    assert isinstance(await parts.router.route(asked, ""), RoutePlan), "nobody is delayed"
    assert isinstance(members[1], Membership)
    fleet.report(members[1], WorkerLoad(blocks_free=512, pending_tokens=500), 0.0)
    refused = await parts.router.route(asked, "")
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.DEADLINE
    reading = replace(asked, ttft_budget_ms=0)
    assert isinstance(await parts.router.route(reading, ""), RoutePlan)
