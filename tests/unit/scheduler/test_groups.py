"""P/D groups by scenario in a live scheduler: who is routed where, and the monitor's direction."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from operator import mul

from kvmesh.core.details import FleetWorker
from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.turns import at_once
from kvmesh.core.types import Role, WorkerLoad
from kvmesh.policy.group_loops import GroupLoops, profile_of
from kvmesh.policy.pdserve import MIN_PER_ROLE, InstanceProfile, RatioReason
from kvmesh.policy.profiled_ratio import MeanLengths
from kvmesh.policy.ratio_monitor import MIN_REQUESTS, WINDOW_S
from kvmesh.policy.waiting import Demand, Looking
from services.scheduler.role_orders import RoleChanges
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.test_planner import BUSY, IDLE, Mesh

PER_ROLE = MIN_PER_ROLE + 1


def groups(**changes: object) -> Mesh:
    mesh = Mesh(**{"policy": "pdserve", **changes})  # type: ignore[arg-type]
    for scenario in ("chat", ""):
        name = scenario or "any"
        for n in range(PER_ROLE):
            mesh.join(
                worker_info(f"{name}-p{n}", scenario=scenario),
                worker_info(f"{name}-d{n}", Role.DECODE, scenario=scenario),
            )
    return mesh


async def window(mesh: Mesh, number: int, prefilling: int) -> None:
    """A window in which each second two requests of each kind come."""
    for second in range(int(WINDOW_S)):
        for n in range(PER_ROLE):
            mesh.report(f"chat-p{n}", prefill_active=prefilling, blocks_free=512)
            mesh.report(f"chat-d{n}", decode_running=2, blocks_free=512)
        for scenario, n in itertools.product(("chat", ""), range(2)):
            await mesh.route(f"{scenario}-{number}-{second}-{n}", scenario=scenario)
        await mesh.second()


async def test_routes_stay_in_the_group_and_say_so() -> None:
    mesh = groups()
    for scenario, name in (("chat", "chat"), ("", "any"), ("other", "any")):
        plan = await mesh.route(f"r-{scenario}", scenario=scenario)
        asked = [each.worker_id for each in (*plan.prefill, *plan.decode)]
        assert len(asked) == 2 * PER_ROLE
        assert all(each.startswith(name) for each in asked)
    newest, general, first = mesh.decisions.as_json()["routes"]
    assert (first["group"], first["group_reason"]) == ("chat@east", "serves the scenario")
    assert general["group"] == newest["group"] == "any@east"
    assert newest["group_reason"] == "no group serves the scenario, this one serves any"
    assert newest["scenario"] == "other"


async def test_prompts_that_pile_up_move_an_instance_of_their_group() -> None:
    mesh = groups()
    await window(mesh, 0, prefilling=1)
    said = [each["reason"] for each in mesh.fleet_log("ratio")]
    assert said == ["steady", "steady"], "nobody waits in either group"
    await window(mesh, 1, prefilling=4)
    assert mesh.orders == [("chat-d0", "prefill")]
    (moved,) = [each for each in mesh.fleet_log("ratio") if "worker_id" in each]
    assert (moved["reason"], moved["outcome"]) == ("prefill_grew", "applied")
    steady = [each for each in mesh.fleet_log("ratio") if "worker_id" not in each]
    assert [each["group"] for each in steady].count("any@east") == 2, "the other is as before"


async def test_a_change_that_no_worker_was_told_of_is_asked_for_again() -> None:
    mesh = groups()
    await window(mesh, 0, prefilling=1)
    mesh.planner.role_orders.give_role = lambda _worker, _role, _reason: False
    for number in (1, 2):
        await window(mesh, number, prefilling=4**number)
    reasons = [each["reason"] for each in mesh.fleet_log("ratio")]
    assert "settling" not in reasons


def test_who_waits_counts_in_seconds_in_which_nobody_comes() -> None:
    loads = (WorkerLoad(prefill_active=1), WorkerLoad(decode_running=1))
    workers = [
        FleetWorker(worker_info(f"{role.value}-{n}", role), load)
        for role, load in zip((Role.PREFILL, Role.DECODE), loads, strict=True)
        for n in range(PER_ROLE)
    ]
    loops = GroupLoops()
    for second in range(int(WINDOW_S)):
        if second == WINDOW_S - 1:
            for _ in range(MIN_REQUESTS):
                loops.note_new("", MeanLengths(100, 100, 10))
        at_once(loops.observe(workers, Demand({"": Looking(4 * PER_ROLE)}), 1.0))
    (found,) = loops.end_window(workers)
    assert found.step.grow is Role.PREFILL


async def test_recommended_changes_are_told_and_not_ordered() -> None:
    mesh = groups(changes=RoleChanges.OFF)
    await window(mesh, 0, prefilling=1)
    await window(mesh, 1, prefilling=4)
    assert mesh.fleet_log("ratio") == []
    assert mesh.orders == []


async def test_other_policies_have_no_monitor() -> None:
    mesh = Mesh(policy="forwarding")
    mesh.join(worker_info("p"), worker_info("d", Role.DECODE))
    for _ in range(2 * int(WINDOW_S)):
        await mesh.route("r")
        mesh.report("p", **IDLE)
        await mesh.second()
    assert mesh.fleet_log("ratio") == []


async def test_the_role_loop_takes_no_worker_of_another_group() -> None:
    """Group doc is overloaded; group chat idles and has workers that doc cannot use."""
    mesh = Mesh(policy="kvmesh")
    for scenario in ("chat", "doc"):
        mesh.join(worker_info(f"{scenario}-p", scenario=scenario))
        for n in range(2):
            mesh.join(worker_info(f"{scenario}-d{n}", Role.DECODE, scenario=scenario))
    for second in range(6):
        mesh.clock.advance(1.0)
        mesh.report("doc-p", **BUSY)
        await mesh.route(f"chat-{second}", scenario="chat")
        for n in range(3):
            await mesh.route(f"doc-{n}", scenario="doc", waiting=6, waiting_reserved=6)
        await mesh.planner.cycle(may_order=True)
    assert mesh.orders, "doc's own decode worker helps"
    assert {name for name, _ in mesh.orders} <= {"doc-d0", "doc-d1"}


async def test_the_monitor_tells_clusters_apart() -> None:
    mesh = Mesh(policy="pdserve")
    for cluster in ("east", "west"):
        for n in range(PER_ROLE):
            mesh.join(
                worker_info(f"{cluster}-p{n}", cluster=cluster),
                worker_info(f"{cluster}-d{n}", Role.DECODE, cluster=cluster),
            )
    for prefilling in (1, 4):
        for second in range(int(WINDOW_S)):
            for n in range(PER_ROLE):
                mesh.report(f"west-p{n}", prefill_active=prefilling, blocks_free=512)
                mesh.report(f"east-p{n}", prefill_active=1, blocks_free=512)
                for cluster in ("east", "west"):
                    mesh.report(f"{cluster}-d{n}", decode_running=2, blocks_free=512)
            for n in range(4):
                await mesh.route(f"{prefilling}-{second}-{n}")
            await mesh.second()
    assert mesh.orders == [("west-d0", "prefill")]


async def test_reallocation_moves_nobody_between_groups() -> None:
    mesh = groups(policy="kvmesh")
    loops = mesh.planner._loops("m")
    workers = at_once(mesh.planner._workers_by_model())["m"]
    assert loops.giver(Role.PREFILL, workers) is None
    chat = [each for each in workers if each.info.scenario == "chat"]
    assert loops.giver(Role.PREFILL, chat) == "chat-d0"


def paced(worker: FleetWorker, pace: StepPace) -> FleetWorker:
    return replace(worker, load=replace(worker.load, room=PaceRoom(pace, 100)))


def test_speeds_of_a_group_are_known_when_both_roles_are_measured() -> None:
    prefill = FleetWorker(worker_info("p"), WorkerLoad())
    decode = FleetWorker(worker_info("d", Role.DECODE), WorkerLoad())
    lengths = MeanLengths(500.0, 1000.0, 200.0)
    prompt_s = partial(mul, 0.001)
    for members, speed, known in (
        ([prefill, paced(decode, StepPace(0.01, 1e-6))], None, lengths),
        ([prefill, decode], prompt_s, lengths),
        ([prefill, paced(decode, StepPace(0.01, 1e-6))], prompt_s, None),
    ):
        assert profile_of(members, speed, known) is None
    found = profile_of([prefill, paced(decode, StepPace(0.01, 1e-6))], prompt_s, lengths)
    assert found is not None
    # The blocks hold 8192 tokens: six sequences of 1200, less than the eight slots.
    batch = 8192 / 1200
    assert found == InstanceProfile(1.0, 0.5, batch, 200 * (0.01 + 1e-6 * batch * 1100))


def test_the_scheduler_takes_no_step_with_which_the_group_would_serve_less() -> None:
    """The monitor's rule asks for prefill; prompts take so little that eq. 1 says no."""
    for token_s, grow, reason in (
        (1e-3, Role.PREFILL, RatioReason.BY_RATE),
        (1e-6, None, RatioReason.AGAINST_RATE),
    ):
        workers = [
            paced(
                FleetWorker(
                    worker_info(f"{role.value}-{n}", role),
                    WorkerLoad(prefill_active=int(role is Role.PREFILL), decode_running=1),
                ),
                StepPace(0.02, 0.0),
            )
            for role in (Role.PREFILL, Role.DECODE)
            for n in range(PER_ROLE)
        ]
        loops = GroupLoops()
        for _ in range(MIN_REQUESTS):
            loops.note_new("", MeanLengths(4000, 4000, 100))
        for _ in range(int(WINDOW_S)):
            at_once(loops.observe(workers, Demand({"": Looking(4 * PER_ROLE)}), 1.0))
        (found,) = loops.end_window(workers, partial(mul, token_s))
        assert (found.step.grow, found.step.reason) == (grow, reason)
