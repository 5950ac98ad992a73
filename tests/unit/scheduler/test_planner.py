from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.core.details import ANSWER, COPY, GET, TCP, LinkDetail, WorkerDetail
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import (
    RequestId,
    Role,
    RoutePlan,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.policy.allocation_loop import MIN_LENGTHS
from services.scheduler import metrics
from services.scheduler.config import PlanningConfig
from services.scheduler.fleet import Membership
from services.scheduler.planner import ASKED_WITHIN_S, Planner
from services.scheduler.role_orders import RoleChanges
from tests.unit.policy.fleet_examples import query, worker_info
from tests.unit.scheduler.parts import Parts
from tests.unit.scheduler.test_router import HASHES, Answer, Prefixes

IDLE = {"blocks_free": 512}
BUSY = {"prefill_active": 4, "blocks_free": 256, "budget_used": 1.0, "compute_used": 1.0}
DECODES = {"decode_running": 2, "memory_bandwidth_used": 0.4}
TOTALS = ("prefill_tokens_total", "decode_tokens_total")
OFFLOAD = PlanningConfig(remote_cluster="west", egress_mb_s=1.0, threshold_tokens=1000)


class Mesh(Parts):
    """Workers that report what they are told to."""

    members: dict[str, Membership]

    def join(self, *infos: WorkerInfo) -> None:
        self.members = getattr(self, "members", {})
        for info in infos:
            joined = self.fleet.register(info, self.clock.now())
            assert isinstance(joined, Membership)
            self.members[info.worker_id] = joined
            self.report(info.worker_id, **IDLE)

    def report(self, name: str, **load: float) -> None:
        told = WorkerLoad(**load)  # type: ignore[arg-type]
        assert self.fleet.report(self.members[name], told, self.clock.now())

    async def second(self) -> None:
        self.clock.advance(1.0)
        await self.planner.cycle(may_order=True)

    async def route(self, name: str, num_tokens: int = 320, **changes: Any) -> RoutePlan:
        asked = query(num_tokens, request_id=RequestId(name), **changes)
        plan = await self.router.route(asked, "", "gateway")
        assert isinstance(plan, RoutePlan)
        return plan

    def fleet_log(self, kind: str) -> list[dict[str, object]]:
        return [each for each in self.decisions.as_json()["fleet"] if each["kind"] == kind]


def pairs(**changes: object) -> Mesh:
    mesh = Mesh(**changes)  # type: ignore[arg-type]
    mesh.join(*(worker_info(f"p{n}") for n in range(2)))
    mesh.join(*(worker_info(f"d{n}", Role.DECODE) for n in range(2)))
    return mesh


async def overload(mesh: Mesh, *, may_order: bool = True) -> None:
    """Three seconds in which both prefill workers are full and six requests wait."""
    for _ in range(3):
        mesh.clock.advance(1.0)
        for name in ("p0", "p1"):
            mesh.report(name, **BUSY)
        await mesh.route("waits", waiting=6, waiting_reserved=6)
        await mesh.planner.cycle(may_order=may_order)


async def test_measured_links_choose_among_equal_decode_workers() -> None:
    mesh = pairs()
    await mesh.second()
    carried = tuple(
        LinkDetail(WorkerId(peer), "tcp", bytes_total=1 << 24, busy_s=busy_s)
        for peer, busy_s in (("d0", 0.01), ("d1", 9.0))
    )
    for sender in ("p0", "p1"):
        mesh.fleet.note_detail(mesh.members[sender], WorkerDetail(links=carried))
    for number in range(6):
        await mesh.second()
        for name in mesh.members:
            mesh.report(name, **IDLE)
        plan = await mesh.route(f"r{number}")
        assert plan.decode[0].worker_id == "d0"


class TestRoles:
    async def test_an_idle_decode_worker_is_ordered_to_help(self) -> None:
        mesh = pairs()
        await mesh.second()
        assert mesh.orders == []
        await overload(mesh)
        assert mesh.orders[0] == ("d0", "prefill")
        entry = mesh.fleet_log("switch")[-1]
        assert (entry["reason"], entry["outcome"]) == ("helps_prefill", "applied")
        assert entry["worker_id"] == "d0"

    async def test_recommended_once_and_not_carried_out(self) -> None:
        mesh = pairs(changes=RoleChanges.RECOMMEND)
        await overload(mesh, may_order=False)
        assert mesh.orders == []
        (entry,) = mesh.fleet_log("switch")
        assert entry["outcome"] == "recommended"

    async def test_a_recommendation_is_told_once_beside_another_model(self) -> None:
        mesh = pairs(changes=RoleChanges.RECOMMEND)
        mesh.join(worker_info("q0", model="n"), worker_info("q1", Role.DECODE, model="n"))
        await overload(mesh, may_order=False)
        assert len(mesh.fleet_log("switch")) == 1

    async def test_nothing_is_kept_of_workers_that_left(self) -> None:
        mesh = pairs(changes=RoleChanges.RECOMMEND)
        await overload(mesh, may_order=False)
        assert mesh.planner.role_orders.num_recommended
        assert mesh.planner._scale
        for joined in mesh.members.values():
            assert mesh.fleet.leave(joined)
        await mesh.second()
        assert not mesh.planner.role_orders.num_recommended
        assert not mesh.planner._scale

    async def test_off_decides_nothing(self) -> None:
        mesh = pairs(changes=RoleChanges.OFF)
        await overload(mesh)
        assert mesh.fleet_log("switch") == []

    async def test_policy_without_switches_decides_nothing(self) -> None:
        mesh = pairs(policy="cache_load")
        await overload(mesh)
        assert mesh.orders == []


class TestThreshold:
    @staticmethod
    def mesh() -> Mesh:
        made = Mesh(planning=OFFLOAD, changes=RoleChanges.OFF)
        made.join(worker_info("far", cluster="west"), worker_info("p"))
        made.join(worker_info("d", Role.DECODE))
        return made

    async def test_long_prompts_go_to_the_remote_cluster(self) -> None:
        mesh = self.mesh()
        assert (await mesh.route("long", 1600)).prefill[0].worker_id == "far"
        assert (await mesh.route("short", 800)).prefill[0].worker_id == "p"

    async def test_watchers_hear_of_it_before_any_request_and_when_it_moves(self) -> None:
        mesh = self.mesh()
        told: list[float | None] = []
        mesh.planner.on_details = lambda: told.extend(
            each.threshold_tokens for each in mesh.planner.details()
        )
        await mesh.second()
        await mesh.second()
        assert told == [1000.0]
        mesh.report("far", **IDLE, sent_bytes_total=50_000_000)
        await mesh.second()
        assert len(told) == 2
        assert told[1] is not None
        assert told[1] > 1000.0

    async def test_full_link_raises_it_and_it_returns(self) -> None:
        mesh, sent = self.mesh(), 0
        assert not mesh.planner.offload("m").link_has_room, "nothing was seen of it yet"
        await mesh.second()
        assert mesh.planner.offload("m").link_has_room
        for _ in range(3):
            sent += 990_000
            mesh.report("far", sent_bytes_total=sent, **IDLE)
            await mesh.second()
            assert not mesh.planner.offload("m").link_has_room
        raised = mesh.planner.offload("m").threshold_tokens
        assert raised == pytest.approx(1000 * 1.15**3)
        assert [each["reason"] for each in mesh.fleet_log("threshold")] == ["link_full"] * 3
        for _ in range(40):
            await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens == 1000
        assert mesh.planner.offload("m").link_has_room

    async def test_a_link_that_carries_less_than_it_should_raises_it(self) -> None:
        mesh, sent = self.mesh(), 0
        for _ in range(4):
            sent += 330_000
            mesh.report("far", sent_bytes_total=sent, sending_bytes=900_000, **IDLE)
            await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens == pytest.approx(1000 * 1.15**3)
        for _ in range(60):
            mesh.report("far", sent_bytes_total=sent, **IDLE)
            await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens == 1000

    @pytest.mark.parametrize("receiver", ["p", "elsewhere"])
    async def test_round_trips_that_grow_on_the_way_home_raise_it(self, receiver: str) -> None:
        mesh = self.mesh()
        for second, rtt_s in enumerate((0.02, 0.06, 0.06)):
            sent = 300_000 * second
            link = LinkDetail(WorkerId(receiver), TCP, bytes_total=sent, rtt_s=rtt_s)
            mesh.fleet.note_detail(mesh.members["far"], WorkerDetail(links=(link,)))
            mesh.report("far", sent_bytes_total=sent, sending_s_total=float(second), **IDLE)
            await mesh.second()
        is_home = receiver == "p"
        assert mesh.planner.offload("m").link_has_room is not is_home
        assert (mesh.planner.offload("m").threshold_tokens > 1000) is is_home

    async def test_what_was_sent_before_the_scheduler_began_is_not_of_this_second(self) -> None:
        mesh = self.mesh()
        again = mesh.fleet.register(worker_info("far", cluster="west"), mesh.clock.now())
        assert isinstance(again, Membership)
        mesh.members["far"] = again
        await mesh.second()
        mesh.report("far", sent_bytes_total=727_000_000, **IDLE)
        await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens == 1000

    @pytest.mark.parametrize("channel", [GET, COPY, ANSWER])
    async def test_what_is_read_or_answered_from_there_counts_as_sent(self, channel: str) -> None:
        mesh = self.mesh()
        for read in (500_000, 1_490_000, 2_480_000):
            # By another worker of the remote cluster: that stays inside.
            for reader, peer, total in (("p", "far", read), ("far", "elsewhere", 9 * read)):
                link = LinkDetail(WorkerId(peer), channel, bytes_total=total)
                mesh.fleet.note_detail(mesh.members[reader], WorkerDetail(links=(link,)))
            await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens == pytest.approx(1000 * 1.15**2)
        await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens < 1000 * 1.15**2

    async def test_a_meter_of_reads_that_counts_anew_takes_nothing_from_what_is_sent(self) -> None:
        mesh = self.mesh()
        for read, sent in ((500_000, 0), (0, 990_000)):
            link = LinkDetail(WorkerId("far"), GET, bytes_total=read)
            mesh.fleet.note_detail(mesh.members["p"], WorkerDetail(links=(link,)))
            mesh.report("far", sent_bytes_total=sent, **IDLE)
            await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens == pytest.approx(1000 * 1.15)

    async def test_requests_that_wait_for_the_remote_cluster_raise_it(self) -> None:
        mesh = self.mesh()
        wait = {"waiting": 3, "waiting_reserved": 3, "waiting_remote": 3}
        await mesh.route("a", 1600, **wait)
        await mesh.second()
        assert mesh.planner.offload("m").threshold_tokens == 1000, "told too long ago"
        await mesh.route("a", 1600, **wait)
        await mesh.planner.cycle(may_order=False)
        assert mesh.planner.offload("m").threshold_tokens > 1000
        assert mesh.fleet_log("threshold")[0]["reason"] == "remote_surge"

    @staticmethod
    def with_prefix(name: str, num_blocks: int) -> Mesh:
        """One worker holds the beginning of every prompt."""
        match = PrefixMatch(WorkerId(name), 1, "any", num_blocks)
        planning = replace(OFFLOAD, egress_mb_s=100.0)
        made = Mesh(
            prefixes=Prefixes(fingerprint=Answer((match,))),
            planning=planning,
            changes=RoleChanges.OFF,
        )
        made.join(worker_info("far", cluster="west"), worker_info("p"))
        made.join(worker_info("d", Role.DECODE))
        return made

    @staticmethod
    async def measured(mesh: Mesh, out_s: float, back_s: float) -> None:
        """Sends KV both ways: handoffs home and reads from there.

        Args:
            out_s, back_s: seconds for 2,000 tokens from home to the far cluster, and back.
        """
        for second in range(1, 20):
            mesh.report("p", **{**IDLE, "prefill_tokens_total": 1000 * second}, compute_used=1.0)
            # A token's KV is 1,024 bytes.
            links = (
                LinkDetail(WorkerId("d"), TCP, 2_048_000 * second, busy_s=back_s * second),
                LinkDetail(WorkerId("p"), GET, 2_048_000 * second, busy_s=out_s * second),
            )
            mesh.fleet.note_detail(mesh.members["far"], WorkerDetail(links=links))
            mesh.report("far", **IDLE, sent_bytes_total=2_048_000 * second)
            await mesh.second()

    async def test_a_prefix_of_home_goes_along_over_a_link_that_is_fast_that_way(self) -> None:
        """Home holds 2,000 of 3,400 tokens; the link brings a token in 5 % of computing it."""
        mesh = self.with_prefix("p", 125)
        await self.measured(mesh, out_s=0.1, back_s=1.9)
        pace = mesh.planner.pace("m")
        assert pace.share("east", "west") == pytest.approx(0.05, rel=0.01)
        assert pace.share("west", "east") == pytest.approx(0.95, rel=0.01)
        plan = await mesh.route("after", 3400, block_hashes=HASHES)
        first = plan.prefill[0]
        assert first.worker_id == "far"
        assert first.source is not None
        assert (first.source.worker_id, first.source.num_blocks) == ("p", 125)
        (newest, *_) = mesh.decisions.as_json()["routes"]
        assert newest["compared_tokens"] == 1400
        shown = metrics.PATH_TOKEN_SECONDS.labels("m", "west", "east")._value.get()
        assert shown == pytest.approx(1.9 / 2000)

    async def test_a_prefix_of_home_stays_where_the_link_is_slow_that_way_only(self) -> None:
        mesh = self.with_prefix("p", 125)
        await self.measured(mesh, out_s=1.9, back_s=0.1)
        plan = await mesh.route("after", 3400, block_hashes=HASHES)
        first = plan.prefill[0]
        assert (first.worker_id, first.source) == ("far", None)

    @pytest.mark.parametrize(("out_s", "back_s", "comes"), [(1.9, 0.1, True), (0.1, 1.9, False)])
    async def test_a_far_prefix_comes_home_where_the_link_is_fast_that_way(
        self, out_s: float, back_s: float, comes: bool
    ) -> None:
        mesh = self.with_prefix("far", 75)
        await self.measured(mesh, out_s, back_s)
        plan = await mesh.route("after", 1500, block_hashes=HASHES)
        source = plan.prefill[0].source
        if comes:
            assert source is not None
            assert source.worker_id == "far"
        else:
            assert (plan.prefill[0].worker_id, source) == ("far", None)

    async def test_the_next_turn_stays_where_the_last_answer_was_generated(self) -> None:
        """1,504 of 1,540 tokens lie on the decode worker at home."""
        mesh = self.with_prefix("d", 94)
        plan = await mesh.route("turn", 1540, block_hashes=HASHES)
        assert "far" not in {each.worker_id for each in plan.prefill}
        (newest, *_) = mesh.decisions.as_json()["routes"]
        assert newest["reason"] != "long_prompt"
        assert newest["compared_tokens"] == 36
        longer = await mesh.route("other", 1504 + 1100, block_hashes=HASHES)
        assert longer.prefill[0].worker_id == "far"

    async def test_none_without_a_remote_cluster(self) -> None:
        assert math.isinf(pairs().planner.offload("m").threshold_tokens)

    async def test_ends(self) -> None:
        for policy, tokens in (("all_remote", 0.0), ("all_local", math.inf)):
            mesh = Mesh(planning=OFFLOAD, policy=policy)
            assert mesh.planner.offload("m").threshold_tokens == tokens


class TestReallocation:
    async def work(self, mesh: Mesh) -> None:
        """Prompts of a thousand tokens that take a second, answers that take next to nothing."""
        for number in range(MIN_LENGTHS):
            await mesh.route(f"r{number}", 1000, max_new_tokens=2)
        for second in range(1, 11):
            for name in ("p0", "p1"):
                computed = 1000 * second
                mesh.report(name, prefill_tokens_total=computed, compute_used=1.0, **IDLE)
            total = 80 * second
            for name in ("d0", "d1", "d2", "d3"):
                mesh.report(name, **IDLE, **{**DECODES, **dict.fromkeys(TOTALS, total)})
            mesh.clock.advance(0.9)
            await mesh.route(f"w{second}", 1000, waiting=4, waiting_reserved=4)
            mesh.clock.advance(0.1)
            await mesh.planner.cycle(may_order=False)

    async def test_the_split_follows_lengths_and_queues(self) -> None:
        mesh = pairs(policy="prfaas")
        mesh.join(*(worker_info(f"d{n}", Role.DECODE) for n in (2, 3)))
        await mesh.planner.reallocate(may_order=True)
        assert mesh.orders == [], "nothing is known yet"
        await self.work(mesh)
        await mesh.planner.reallocate(may_order=True)
        assert mesh.orders == [("d0", "prefill")]
        (entry,) = mesh.fleet_log("reallocation")
        assert (entry["reason"], entry["outcome"]) == ("prefill_bottleneck", "applied")

    async def test_in_one_cluster_role_switching_decides_alone(self) -> None:
        mesh = pairs(policy="kvmesh")
        mesh.join(*(worker_info(f"d{n}", Role.DECODE) for n in (2, 3)))
        await self.work(mesh)
        await mesh.planner.reallocate(may_order=True)
        assert mesh.fleet_log("reallocation") == []


async def test_of_several_schedulers_the_one_that_is_asked_may_order() -> None:
    store_clock = Parts().clock
    store = MemoryFleetStore(store_clock)
    meshes = [pairs() for _ in range(2)]
    planners = [
        Planner(
            mesh.fleet,
            mesh.router._settings.policy,
            PlanningConfig(),
            mesh.decisions,
            mesh.clock,
            changes=RoleChanges.APPLY,
            store=store,
            owner=f"scheduler-{number}",
        )
        for number, mesh in enumerate(meshes)
    ]
    assert [await each._may_order() for each in planners] == [False, False]
    planners[1].note_route("gateway", query(), None)
    assert [await each._may_order() for each in planners] == [False, True]
    planners[0].note_route("gateway", query(), None)
    assert not await planners[0]._may_order(), "the other one holds the lease"
    meshes[1].clock.advance(ASKED_WITHIN_S + 1)
    store_clock.advance(ASKED_WITHIN_S + 1)
    assert [await each._may_order() for each in planners] == [True, False]


async def test_a_large_fleet_is_scored_beside_the_event_loop() -> None:
    mesh = Mesh()
    mesh.join(*(worker_info(f"p{n}") for n in range(30)))
    mesh.join(*(worker_info(f"d{n:02}", Role.DECODE) for n in range(30)))
    for number in range(3):
        mesh.clock.advance(1.0)
        for name in range(30):
            mesh.report(f"p{name}", **BUSY)
        await mesh.route(f"w{number}", waiting=90, waiting_reserved=90)
        await mesh.planner.cycle(may_order=True)
    assert mesh.orders[0] == ("d00", "prefill")
    assert len(set(mesh.orders)) == 20, "two thirds of the idle side help"
