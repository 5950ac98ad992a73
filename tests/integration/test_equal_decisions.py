"""One trace, replayed through the live services and through the simulator: equal decisions."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmesh.core.config import environment
from kvmesh.core.types import Refusal, RequestId, WorkerId
from kvmesh.metadata.redis_client import RedisConfig
from kvmesh.policy import chain, composition, gathering, joint, recent_reads, seats
from kvmesh.policy.connections import Connections
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.elastic import ElasticReason
from kvmesh.policy.explain import CandidateFacts, DecisionFacts, describe_decision
from kvmesh.policy.joint_choice import JointReason
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.policy.pdserve import TimeoutTier
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.view import WorkerView
from kvmesh.sim import router as sim_router
from kvmesh.sim.fleet import SimFleet, parse_fleet
from kvmesh.sim.profile import DecodeCost, Device, Links, Profile
from kvmesh.sim.profile_file import load_profile
from kvmesh.sim.scenario import Objectives, Scenario
from kvmesh.sim.simulation import Simulation
from kvmesh.sim.systems import SYSTEMS
from kvmesh.sim.trace import read_trace
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from services.scheduler import fleet as scheduler_fleet
from services.scheduler import router
from tests.live_replay import NUM_BLOCKS, Round, WorkerPlan, live_mesh
from tests.redis_server import redis_url

FLEET = "home:d:prefill:3,home:d:decode:3"
DEVICE = Device("d", Quadratic(100.0, 0.0), DecodeCost(0.01, 0.0, 0.0), NUM_BLOCKS, 2, 4)
"""A prompt takes longer than a round to come in, so engines stand still meanwhile."""

ROUND_S = 1000.0
ROUND_SIZE = 6
"""As many as there are prefill slots: nobody has to wait."""

GROUPS = "chat:d:prefill:2,chat:d:decode:2,code:d:prefill:2,code:d:decode:2"
"""Each cluster is the P/D group of the scenario that it is named after."""

MAX_BLOCKS = 30

Decisions = list[DecisionFacts]


@pytest.fixture
def decided(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Decisions:
    """All decisions made from here on, wherever, in order.

    With the parameter `chains`, workers can compute prompts together, and decisions say so; but
    nobody does, since engines that stand still would wait for each other.
    """
    kept: Decisions = []
    has_chains = getattr(request, "param", "") == "chains"

    def comparable_ask(view: Any, query: Any, matches: Any) -> joint.Ask:
        # A gateway makes the name of a request unique; ties fall by the name.
        query = dataclasses.replace(query, request_id=RequestId(query.request_id.split("-")[0]))
        # Live engines stand still and links are this machine's: what was measured means nothing.
        view = dataclasses.replace(view, pace=FetchPace())
        if has_chains:
            view = dataclasses.replace(view, workers=tuple(map(with_layers, view.workers)))
        return joint.Ask(query, view, matches)

    def decide(policy: Any, view: Any, query: Any, matches: Any, now: Any, offload: Any) -> Any:
        ask = comparable_ask(view, query, matches)
        made = composition.decide_route(policy, ask.view, ask.query, matches, now, offload)
        kept.append(describe_decision(ask.view, ask.query, made, policy.route, offload))
        return without_parts(made)

    def decide_jointly(policy: Any, asks: Any, now: Any, offload: Any) -> Any:
        # Requests that are sent at once arrive in any order; ties fall by their order here.
        ordered = sorted(map(comparable_ask_of, asks), key=lambda each: each.query.request_id)
        made = joint.decide_jointly(policy, ordered, now, offload)
        plans = {}
        for ask, plan in zip(ordered, made, strict=True):
            kept.append(describe_decision(ask.view, ask.query, plan, policy.route, offload))
            plans[ask.query.request_id] = plan
        ids = [comparable_ask_of(each).query.request_id for each in asks]
        return [without_parts(plans[each]) for each in ids]

    def comparable_ask_of(ask: Any) -> joint.Ask:
        return comparable_ask(ask.view, ask.query, ask.matches)

    # How long ago a live worker reported is this machine's, too.
    for policies in (chain, seats, joint, scheduler_fleet):
        monkeypatch.setattr(policies, "SILENT_AFTER_S", math.inf)
    for module in (router, sim_router):
        monkeypatch.setattr(module, "decide_route", decide)
        monkeypatch.setattr(module, "decide_jointly", decide_jointly)
    return kept


def with_layers(worker: WorkerView) -> WorkerView:
    """A worker that takes part in chains."""
    layout = dataclasses.replace(worker.info.layout, num_layers=12)
    info = dataclasses.replace(worker.info, layout=layout, pair_share=2e-4)
    return dataclasses.replace(worker, info=info)


def without_parts(decision: OffloadPlan) -> OffloadPlan:
    """The same, but its first worker computes all by itself."""
    route = decision.route
    if isinstance(route, Refusal) or not chain.upstream_parts(route.prefill[0].source):
        return decision
    alone = dataclasses.replace(route.prefill[0], source=None)
    return dataclasses.replace(
        decision, route=dataclasses.replace(route, prefill=(alone, *route.prefill[1:]))
    )


def in_rounds(requests: Sequence[TraceRequest], size: int) -> list[Round]:
    return [requests[first : first + size] for first in range(0, len(requests), size)]


def synthetic(seed: int, count: int = 24) -> list[TraceRequest]:
    """Conversations that share a system prompt and go on, and short prompts of their own."""
    draw = random.Random(seed)
    ids = itertools.count(1000)
    histories: list[list[int]] = [[1, 2] for _ in range(5)]
    requests: list[TraceRequest] = []
    for _ in range(count):
        if draw.random() < 0.25:
            blocks, tail = 0, draw.randrange(20, 400)
        else:
            history = draw.choice(histories)
            history += [next(ids) for _ in range(draw.randrange(0, 3))]
            blocks, tail = len(history), draw.randrange(1, TRACE_BLOCK)
        prefix = tuple(history) if blocks else ()
        requests.append(
            TraceRequest(
                0.0, blocks * TRACE_BLOCK + tail, draw.randrange(2, 6), (*prefix, next(ids))
            )
        )
    return requests


def profile() -> Profile:
    known = load_profile("flowkv")
    return dataclasses.replace(
        known,
        devices={"d": DEVICE},
        links=Links(1e12, 1e12, 0.0),
        plan=dataclasses.replace(known.plan, remote="d", local="d"),
    )


def simulated(
    rounds: Sequence[Round], policy: str, fleet: str = FLEET, *, together: bool = False
) -> None:
    arrivals = [
        dataclasses.replace(request, arrival_s=number * ROUND_S + index * (not together))
        for number, requests in enumerate(rounds)
        for index, request in enumerate(requests)
    ]
    grouped = fleet == GROUPS
    system = dataclasses.replace(
        SYSTEMS[policy], switch_roles=False, reallocate=False, monitor=False, grouped=grouped
    )
    result = Simulation(
        Scenario(
            profile(),
            parse_fleet(fleet),
            system,
            tuple(arrivals),
            objectives=Objectives((TimeoutTier(1 << 62, 1e6),)),
        )
    ).run()
    assert all(each.finished_s is not None for each in result.requests)


def plans(fleet: str = FLEET) -> list[WorkerPlan]:
    """The workers of a fleet by the names that the simulator gives them."""
    names: list[WorkerPlan] = []
    for group in parse_fleet(fleet):
        scenario = group.cluster if fleet == GROUPS else ""
        for _ in range(group.count):
            name = f"{group.cluster}-{group.role.value}-{len(names)}"
            names.append(
                WorkerPlan(
                    name,
                    group.role,
                    DEVICE.prefill_slots,
                    DEVICE.decode_slots,
                    cluster=group.cluster,
                    scenario=scenario,
                )
            )
    return names


def comparable(facts: DecisionFacts) -> DecisionFacts:
    """Without the sentence, and without what a simulated worker without a queue does not report."""

    def without(side: tuple[CandidateFacts, ...]) -> tuple[CandidateFacts, ...]:
        return tuple(dataclasses.replace(each, pending_tokens=0) for each in side)

    return dataclasses.replace(
        facts, detail="", prefill=without(facts.prefill), decode=without(facts.decode)
    )


async def compare(
    rounds: Sequence[Round],
    policy: str,
    folder: Path,
    decided: Decisions,
    fleet: str = FLEET,
    *,
    together: bool = False,
) -> None:
    with redis_url(folder) as url:
        redis = RedisConfig(url, key_prefix=f"equal-{uuid.uuid4().hex}:")
        async with live_mesh(folder, redis, policy, plans(fleet)) as mesh:
            await mesh.replay(rounds, together=together)
            assert all(worker.is_idle for worker in mesh.workers)
    live = [comparable(each) for each in decided]
    decided.clear()
    simulated(rounds, policy, fleet, together=together)
    assert len(live) == sum(len(each) for each in rounds), "one decision for each request"
    for lived, modelled in zip(live, map(comparable, decided), strict=True):
        assert lived == modelled


@pytest.mark.parametrize("policy", ["kvmesh", "round_robin", "forwarding"])
async def test_a_synthetic_trace(policy: str, tmp_path: Path, decided: Decisions) -> None:
    await compare(in_rounds(synthetic(1), ROUND_SIZE), policy, tmp_path, decided)
    if policy == "kvmesh":
        reasons = {each.reason for each in decided}
        kinds = {"prefix", "fetch", "load", "short_prompt"}
        assert kinds <= reasons, "all kinds of decisions were made"


@pytest.mark.parametrize("policy", ["joint", "tokenlake"])
async def test_requests_that_come_at_once(
    policy: str, tmp_path: Path, decided: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests of a round are decided together, in the services as in the simulator."""
    size = 3
    # They arrive in any order, so the reads of one round must weigh the same.
    monkeypatch.setattr(recent_reads, "_GROWTH", 1.0)
    monkeypatch.setattr(gathering, "MAX_JOINT", size)
    # They wait for the last one of the round, however long that takes.
    for holder in (router, sim_router):
        monkeypatch.setattr(holder, "hold_s", lambda *_: ROUND_S)
    monkeypatch.setattr(gathering, "LOOKUP_S", ROUND_S)
    rounds = in_rounds([each for each in synthetic(4, 30) if len(each.hash_ids) > 1][:15], size)
    await compare(rounds, policy, tmp_path, decided, together=True)
    assert {each.num_asked for each in decided} == {size}
    found = {each.joint_reason for each in decided}
    assert {JointReason.KEPT, JointReason.MOVED} <= found


@pytest.mark.parametrize("decided", ["chains"], indirect=True)
@pytest.mark.parametrize(("policy", "size"), [("kvmesh", 1), ("tokenlake", 2)])
async def test_long_prompts_on_several_workers(
    policy: str, size: int, tmp_path: Path, decided: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who computes which part, and how many workers TokenLake's program gives to a prompt."""
    monkeypatch.setattr(gathering, "MAX_JOINT", size)
    for holder in (router, sim_router):
        monkeypatch.setattr(holder, "hold_s", lambda *_: ROUND_S)
    monkeypatch.setattr(gathering, "LOOKUP_S", ROUND_S)
    lengths = (9, 1, 14, 6, 2, 20, 11, 3)
    requests = [
        TraceRequest(0.0, length * TRACE_BLOCK, 2, tuple(range(40 * n, 40 * n + length)))
        for n, length in enumerate(lengths)
    ]
    await compare(in_rounds(requests, size), policy, tmp_path, decided, together=True)
    assert "chain" in {each.reason for each in decided}
    if policy == "tokenlake":
        assert {1, 2} <= {each.degree for each in decided}
        assert {each.elastic_reason for each in decided} == {ElasticReason.WITHIN_SLO}


async def test_offers_by_connections(
    tmp_path: Path, decided: Decisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under P/D-Serve's policy each gateway offers in an order of its own."""
    orders: list[list[WorkerId]] = []
    order = Connections.order

    def noted(self: Connections, names: Sequence[WorkerId]) -> list[WorkerId]:
        orders.append(order(self, names))
        return orders[-1]

    monkeypatch.setattr(Connections, "order", noted)
    rounds = in_rounds(synthetic(3, 12), ROUND_SIZE)
    await compare(rounds, "pdserve", tmp_path, decided)
    live, modelled = orders[:12], orders[12:]
    assert live == modelled
    assert any(
        each != [candidate.worker_id for candidate in facts.prefill]
        for each, facts in zip(modelled, decided, strict=True)
    ), "it is not the plan's order"


async def test_groups_by_scenario(tmp_path: Path, decided: Decisions) -> None:
    scenarios = itertools.cycle(("chat", "code", "mail"))
    requests = [
        dataclasses.replace(each, scenario=scenario)
        for each, scenario in zip(synthetic(2, 18), scenarios, strict=False)
    ]
    await compare(in_rounds(requests, ROUND_SIZE), "forwarding", tmp_path, decided, GROUPS)
    for each in decided:
        group = "" if each.scenario == "mail" else f"{each.scenario}@{each.scenario}"
        assert each.group == group
        for candidate in (*each.prefill, *each.decode):
            assert not group or candidate.worker_id.startswith(each.scenario)


async def test_the_start_of_a_recorded_trace(tmp_path: Path, decided: Decisions) -> None:
    paths = [Path(each) for each in environment("KVMESH_TRACES").split(":") if each]
    if not paths:
        pytest.skip("KVMESH_TRACES names no trace files")
    for path in paths:
        decided.clear()
        folder = tmp_path / path.name
        folder.mkdir()
        short = [
            dataclasses.replace(each, output_tokens=min(each.output_tokens, 8))
            for each in read_trace(path, limit=60)
            if len(each.hash_ids) <= MAX_BLOCKS and each.input_tokens % TRACE_BLOCK
        ]
        await compare(in_rounds(short[:24], ROUND_SIZE), "kvmesh", folder, decided)


def test_the_fleet_has_the_names_of_the_simulator() -> None:
    run = Simulation(Scenario(profile(), parse_fleet(FLEET), SYSTEMS["all_local"], ()))
    fleet: SimFleet = run.fleet
    assert [plan.name for plan in plans()] == list(fleet.workers)
