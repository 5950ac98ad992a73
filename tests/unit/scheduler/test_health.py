from __future__ import annotations

from kvmesh.core.health import Health
from kvmesh.core.types import RequestId, Role, RoutePlan, WorkerId, WorkerLoad
from kvmesh.policy.health import HANG_S, MIN_LOST, MIN_REFUSED, REST_S
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Membership
from services.scheduler.health import FleetHealth
from tests.unit.policy.fleet_examples import query, worker_info
from tests.unit.scheduler.parts import Parts

HANGS = WorkerLoad(step_age_s=HANG_S, step_expected_s=0.05, blocks_free=512)
IDLE = WorkerLoad(blocks_free=512)


class Judged(Parts):
    """Two prefill and three decode workers."""

    def __init__(self) -> None:
        super().__init__()
        self.health = FleetHealth(self.fleet, FleetFeed(self.fleet), self.decisions, self.clock)
        self.planner.on_query = self.health.note_query
        self.members: dict[str, Membership] = {}
        for role, count in ((Role.PREFILL, 2), (Role.DECODE, 3)):
            for number in range(count):
                info = worker_info(f"{role.value[0]}{number}", role)
                member = self.fleet.register(info, 0.0)
                assert isinstance(member, Membership)
                self.members[info.worker_id] = member

    async def second(self, **loads: WorkerLoad) -> None:
        self.clock.advance(1.0)
        now = self.clock.now()
        for name, member in self.members.items():
            load = loads.get(name, IDLE)
            assert self.fleet.report(member, load, now)
        await self.health.judge(now)

    def shown(self, name: str) -> tuple[Health, bool, str]:
        (found,) = [each for each in self.fleet.workers() if each.info.worker_id == name]
        return found.health, found.load.draining, found.fault

    async def decoders(self, name: str, **asked: object) -> list[WorkerId]:
        wanted = query(2000, request_id=RequestId(name), **asked)
        plan = await self.router.route(wanted, "")
        assert isinstance(plan, RoutePlan)
        return [each.worker_id for each in plan.decode]


async def test_an_engine_that_hangs_gets_nothing_and_is_said_to_be_dead() -> None:
    parts = Judged()
    await parts.second()
    assert sorted(await parts.decoders("a")) == ["d0", "d1", "d2"]
    version = parts.fleet.urgent_version
    await parts.second(d0=HANGS)
    assert parts.shown("d0") == (Health.DEAD, True, "its step does not end")
    assert parts.fleet.urgent_version > version, "gateways hear of it at once"
    assert sorted(await parts.decoders("b")) == ["d1", "d2"]
    (entry,) = [e for e in parts.decisions.as_json()["fleet"] if e["kind"] == "health"]
    assert (entry["worker_id"], entry["health"], entry["reason"]) == ("d0", "dead", "hangs")
    for _ in range(round(REST_S)):
        await parts.second()
    assert parts.shown("d0")[:2] == (Health.SUSPECT, False)
    assert (await parts.decoders("c"))[-1] == "d0", "it is tried last"


async def test_a_worker_that_no_longer_reports_gets_nothing_before_its_lease_ends() -> None:
    parts = Judged()
    await parts.second()
    heard = parts.members.pop("d0")
    for _ in range(2):
        await parts.second()
    now = parts.clock.now()
    assert parts.fleet.silent(now) == {"d0": 2.0}
    await parts.health.judge(now + 0.5, parts.fleet.silent(now + 0.5))
    assert parts.shown("d0") == (Health.DEGRADED, True, "it does not report")
    assert parts.fleet.report(heard, IDLE, now), "it is a member still"
    assert parts.fleet.silent(now) == {}
    await parts.health.judge(now)
    assert parts.shown("d0")[:2] == (Health.OK, False)
    restored = worker_info("r0", Role.DECODE)
    assert parts.fleet.restore(restored, now)
    assert "r0" not in parts.fleet.silent(now + 2.0), "it has not reported to this scheduler yet"


async def test_the_last_of_a_role_is_asked_all_the_same() -> None:
    parts = Judged()
    await parts.second(d0=HANGS)
    for name in ("d1", "d2"):
        assert parts.fleet.leave(parts.members.pop(name))
    await parts.second(d0=HANGS)
    assert parts.shown("d0")[1], "who was ejected while there were others stays so"
    fresh = Judged()
    for name in ("d1", "d2"):
        assert fresh.fleet.leave(fresh.members.pop(name))
    await fresh.second(d0=HANGS)
    assert fresh.shown("d0") == (Health.SUSPECT, False, "it is the last of its role")
    assert await fresh.decoders("a") == ["d0"]


async def test_each_request_that_a_gateway_lost_counts_once() -> None:
    parts = Judged()
    await parts.second()
    lost = frozenset({WorkerId("d0")})
    for _ in range(3 * MIN_LOST):
        await parts.decoders("same", avoid=lost, lost=lost)
    await parts.second()
    assert parts.shown("d0")[0] is Health.OK
    for number in range(MIN_LOST - 1):
        await parts.decoders(f"r{number}", avoid=lost, lost=lost)
    await parts.second()
    assert parts.shown("d0") == (Health.DEGRADED, True, "gateways lose requests there")


async def test_each_request_that_an_idle_worker_refused_counts_once() -> None:
    parts = Judged()
    for _ in range(3):
        await parts.second()
    refused = frozenset({WorkerId("p0")})
    for _ in range(2 * MIN_REFUSED):
        await parts.decoders("same", avoid=refused)
    await parts.second()
    assert parts.shown("p0")[0] is Health.OK
    for number in range(MIN_REFUSED):
        await parts.decoders(f"other {number}", avoid=refused)
    await parts.second()
    assert parts.shown("p0")[0] is Health.DEGRADED


async def test_a_worker_that_does_not_answer_one_gateway_is_tried_last_for_all() -> None:
    parts = Judged()
    for _ in range(3):
        await parts.second()
    assert parts.health.is_quiet
    silent = frozenset({WorkerId("d0")})
    assert (await parts.decoders("one", avoid=silent, unanswered=silent))[-1] == "d0"
    for number in range(2 * MIN_REFUSED):
        told = query(request_id=RequestId(f"{number}"), avoid=silent, unanswered=silent)
        parts.health.note_query(told, parts.clock.now())
    assert not parts.health.is_quiet, "it is judged at the next turn"
    await parts.health.judge(parts.clock.now())
    assert parts.shown("d0") == (Health.SUSPECT, False, "it does not answer a gateway")
    assert (await parts.decoders("another"))[-1] == "d0"
    for _ in range(4):
        await parts.second()
    assert parts.shown("d0") == (Health.OK, False, "")
    assert parts.health.is_quiet


async def test_reports_that_are_judged_already_are_not_judged_again() -> None:
    parts = Judged()
    await parts.second()
    assert not parts.health.is_quiet, "how long a worker has been idle shows at the second look"
    await parts.health.judge(parts.clock.now())
    assert parts.health.is_quiet
    await parts.second(d0=IDLE)
    assert parts.health.is_quiet, "nothing changed"
    await parts.decoders("a", lost=frozenset({WorkerId("d0")}))
    assert not parts.health.is_quiet, "a gateway has told of a loss"


async def test_a_sick_worker_is_judged_as_time_passes() -> None:
    parts = Judged()
    for _ in range(3):
        await parts.second(d0=HANGS)
        assert not parts.health.is_quiet
