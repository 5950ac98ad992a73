from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

import pytest

from kvmesh.core.health import DeviceErrors, Health
from kvmesh.core.turns import at_once
from kvmesh.core.types import Endpoint, Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.engine.step_watch import StepWatch
from kvmesh.policy.health import (
    ALONE_S,
    DAMAGED_WINDOW_S,
    HANG_FACTOR,
    HANG_S,
    IDLE_S,
    MAX_REST_S,
    MIN_DAMAGED,
    MIN_LOST,
    MIN_REFUSED,
    MOST_CROWDED,
    PEER_FACTOR,
    PROBATION_S,
    REST_S,
    SILENT_S,
    SLOW_FACTOR,
    UNANSWERED_S,
    UNKNOWN_STEP_S,
    HealthBoard,
    HealthReason,
    Verdict,
)
from tests.unit.engine.test_step_watch import DECODE, PROMPT
from tests.unit.policy.fleet_examples import worker_info

HANGS = WorkerLoad(step_age_s=HANG_S, step_expected_s=0.05)
ALL_HANG = WorkerLoad(step_age_s=HANG_S * MOST_CROWDED / PEER_FACTOR, step_expected_s=0.05)
"""Longer than a machine may stand still."""
SLOW = WorkerLoad(slowdown=SLOW_FACTOR)
FINE = WorkerLoad(slowdown=1.0)


class Fleet:
    """Four prefill and four decode workers that report each half second."""

    def __init__(self, *, num_each: int = 4) -> None:
        self.board = HealthBoard()
        self.now = 0.0
        self.loads: dict[str, WorkerLoad] = {}
        self.infos: dict[str, WorkerInfo] = {}
        self.silent: dict[WorkerId, float] = {}
        for role in (Role.PREFILL, Role.DECODE):
            for number in range(num_each):
                name = f"{role.value[0]}{number}"
                self.infos[name], self.loads[name] = worker_info(name, role), FINE

    def judge(self, after_s: float = 0.5) -> dict[WorkerId, Verdict]:
        self.now += after_s
        told = [(info, self.loads[name]) for name, info in self.infos.items()]
        return at_once(self.board.verdicts(told, self.now, self.silent))

    def level(self, name: str, after_s: float = 0.5) -> Health:
        return self.judge(after_s)[WorkerId(name)].level

    def ejected(self) -> set[str]:
        return {name for name, each in self.judge().items() if each.level >= Health.DEGRADED}


@pytest.mark.parametrize(
    ("load", "level", "reason"),
    [
        (FINE, Health.OK, HealthReason.FINE),
        (HANGS, Health.DEAD, HealthReason.HANGS),
        (dataclasses.replace(HANGS, step_age_s=HANG_S / 2), Health.SUSPECT, HealthReason.HANGS),
        (WorkerLoad(step_age_s=4.0, step_expected_s=5.0), Health.OK, HealthReason.FINE),
        (WorkerLoad(step_age_s=UNKNOWN_STEP_S / 3), Health.OK, HealthReason.FINE),
        (WorkerLoad(step_age_s=UNKNOWN_STEP_S), Health.DEAD, HealthReason.HANGS),
        (SLOW, Health.DEGRADED, HealthReason.SLOW),
        (WorkerLoad(slowdown=SLOW_FACTOR / 2), Health.SUSPECT, HealthReason.SLOW),
    ],
)
def test_levels(load: WorkerLoad, level: Health, reason: HealthReason) -> None:
    fleet = Fleet()
    fleet.loads["d1"] = load
    found = fleet.judge()
    assert (found[WorkerId("d1")].level, found[WorkerId("d1")].reason) == (level, reason)
    assert all(each == Verdict() for name, each in found.items() if name != "d1")


def test_a_worker_where_requests_are_lost_is_drained() -> None:
    fleet = Fleet()
    fleet.judge()
    for count in range(MIN_LOST):
        assert fleet.level("p0", 0.1) is (Health.OK if count < 2 else Health.SUSPECT)
        fleet.board.note_lost(WorkerId("p0"), fleet.now)
    assert fleet.level("p0") is Health.DEGRADED


def test_a_worker_that_does_not_answer_a_gateway_is_tried_last_and_not_ejected() -> None:
    fleet = Fleet()
    fleet.judge()
    for _ in range(10 * MIN_LOST):
        fleet.board.note_unanswered(WorkerId("p0"), fleet.now)
        verdict = fleet.judge(0.1)[WorkerId("p0")]
        assert (verdict.level, verdict.reason) == (Health.SUSPECT, HealthReason.UNANSWERED)
    assert fleet.level("p0", UNANSWERED_S) is Health.OK, "no gateway has told of it since"


def test_a_worker_that_computes_no_numbers_is_drained() -> None:
    fleet = Fleet()
    fleet.judge()
    fleet.loads["d1"] = dataclasses.replace(FINE, damaged_total=MIN_DAMAGED)
    verdict = fleet.judge()[WorkerId("d1")]
    assert (verdict.level, verdict.reason) == (Health.DEGRADED, HealthReason.DAMAGED)


def test_a_worker_that_is_alone_with_a_damaged_sequence_is_drained() -> None:
    fleet = Fleet()
    fleet.judge()
    fleet.loads["d1"] = dataclasses.replace(FINE, damaged_total=1)
    assert fleet.level("d1") is Health.SUSPECT, "the request may be the reason"
    assert fleet.level("d1", ALONE_S - 0.1) is Health.SUSPECT
    assert fleet.level("d1", 0.2) is Health.DEGRADED
    assert fleet.level("d1", REST_S) is Health.SUSPECT
    assert fleet.level("d1", PROBATION_S) is Health.OK, "an old sequence is no new one"


@pytest.mark.parametrize("other", ["d2", "p0"])
def test_a_request_that_damages_wherever_it_goes_ejects_nobody(other: str) -> None:
    fleet = Fleet()
    fleet.judge()
    fleet.loads["d1"] = dataclasses.replace(FINE, damaged_total=1)
    assert not fleet.ejected()
    fleet.now += ALONE_S - 0.6
    fleet.loads[other] = dataclasses.replace(FINE, damaged_total=1)
    for _ in range(20):
        assert not fleet.ejected()
    assert fleet.level("d1") is Health.SUSPECT
    assert fleet.level(other, DAMAGED_WINDOW_S) is Health.OK, "no further one in that time"


def of_device(**errors: int) -> WorkerLoad:
    return dataclasses.replace(FINE, device=DeviceErrors(**errors))  # type: ignore[arg-type]


def test_one_uncorrectable_error_of_its_device_ejects_a_worker_for_a_rest() -> None:
    fleet = Fleet()
    fleet.loads["d1"] = of_device(errors_total=1, last_xid=48)
    verdict = fleet.judge()[WorkerId("d1")]
    assert (verdict.level, verdict.reason) == (Health.DEGRADED, HealthReason.DEVICE)
    assert fleet.level("d1", REST_S - 1) is Health.DEGRADED
    assert fleet.level("d1", 2) is Health.SUSPECT
    assert fleet.level("d1", PROBATION_S) is Health.OK, "an old error is no new one"
    fleet.loads["d1"] = of_device(errors_total=2, last_xid=48)
    assert fleet.level("d1") is Health.DEGRADED


@pytest.mark.parametrize(
    ("device", "level", "reason"),
    [
        ({"failing": True}, Health.DEGRADED, HealthReason.DEVICE),
        ({"lost": True}, Health.DEAD, HealthReason.DEVICE_LOST),
        ({"lost": True, "failing": True}, Health.DEAD, HealthReason.DEVICE_LOST),
    ],
)
def test_a_device_that_fails_for_good_keeps_its_worker_out(
    device: dict[str, int], level: Health, reason: HealthReason
) -> None:
    fleet = Fleet()
    fleet.loads["d1"] = of_device(**device)
    for after_s in (0.5, REST_S + 1, MAX_REST_S):
        verdict = fleet.judge(after_s)[WorkerId("d1")]
        assert (verdict.level, verdict.reason) == (level, reason)
        assert verdict.is_ill
    assert verdict.hangs == (level is Health.DEAD), "a launcher ends who computes nothing more"
    fleet.loads["d1"] = FINE
    assert fleet.level("d1", 0.5) is Health.SUSPECT
    assert fleet.level("d1", PROBATION_S) is Health.OK


def test_the_last_of_its_role_stays_and_is_ended_if_its_device_is_lost() -> None:
    fleet = Fleet(num_each=1)
    fleet.loads["d0"] = of_device(lost=True)
    verdict = fleet.judge()[WorkerId("d0")]
    assert (verdict.level, verdict.reason) == (Health.SUSPECT, HealthReason.LAST)
    assert verdict.hangs


def test_a_worker_that_refuses_while_it_stands_idle_is_drained() -> None:
    fleet = Fleet()
    fleet.judge()
    fleet.judge(IDLE_S)
    for _ in range(MIN_REFUSED):
        assert fleet.level("p0", 0.1) < Health.DEGRADED
        fleet.board.note_refused(WorkerId("p0"), fleet.now)
    verdict = fleet.judge(IDLE_S)[WorkerId("p0")]
    assert (verdict.level, verdict.reason) == (Health.DEGRADED, HealthReason.REFUSES)


def test_an_idle_worker_that_many_requests_reach_at_once_may_refuse() -> None:
    fleet = Fleet()
    fleet.judge()
    fleet.judge(IDLE_S)
    for _ in range(3 * MIN_REFUSED):
        fleet.board.note_refused(WorkerId("p0"), fleet.now)
        assert fleet.level("p0", 0.01) is Health.OK, "its report is still under way"
    fleet.loads["p0"] = WorkerLoad(prefill_active=1)
    assert fleet.level("p0", 0.01) is Health.OK
    fleet.loads["p0"] = WorkerLoad()
    assert fleet.level("p0", 2 * IDLE_S) is Health.OK


@pytest.mark.parametrize(
    "load",
    [
        WorkerLoad(prefill_active=1),
        WorkerLoad(decode_reserved=1),
        WorkerLoad(pending_tokens=7),
        WorkerLoad(draining=True),
    ],
)
def test_a_worker_that_has_something_to_do_may_refuse(load: WorkerLoad) -> None:
    fleet = Fleet()
    fleet.judge()
    fleet.loads["p0"] = load
    for _ in range(3 * MIN_REFUSED):
        fleet.board.note_refused(WorkerId("p0"), fleet.now)
        assert fleet.level("p0", 0.1) is Health.OK


def test_a_worker_that_computes_between_two_reports_may_refuse() -> None:
    fleet = Fleet()
    for tokens in range(3 * MIN_REFUSED):
        fleet.loads["p0"] = WorkerLoad(prefill_tokens_total=tokens)
        assert fleet.level("p0", IDLE_S) is Health.OK
        fleet.board.note_refused(WorkerId("p0"), fleet.now)


def test_an_engine_that_hangs_is_more_than_slow() -> None:
    fleet = Fleet()
    fleet.loads["d1"] = dataclasses.replace(HANGS, slowdown=1000.0)
    assert fleet.level("d1") is Health.DEAD


def test_a_machine_on_which_all_are_slow_loses_nobody() -> None:
    fleet = Fleet()
    fleet.loads = dict.fromkeys(fleet.loads, WorkerLoad(slowdown=20.0))
    assert not fleet.ejected()


def test_a_machine_that_stands_still_for_a_moment_loses_nobody() -> None:
    fleet = Fleet()
    elsewhere = Endpoint("10.0.0.2", 5000)
    for name in ("p2", "p3", "d2", "d3"):
        info = fleet.infos[name]
        fleet.infos[name] = dataclasses.replace(info, control_endpoint=elsewhere)
        fleet.loads[name] = dataclasses.replace(HANGS, slowdown=10.0)
    assert not fleet.ejected()
    fleet.loads["d0"] = HANGS
    assert fleet.ejected() == {"d0"}, "on the other machine it is one alone"
    for name in ("p2", "p3", "d2"):
        fleet.loads[name] = WorkerLoad(slowdown=2.0)
    fleet.loads["d0"] = FINE
    fleet.loads["d3"] = HANGS
    assert "d3" in fleet.ejected(), "while the others go on, if slowly"


def test_no_more_than_a_share_of_a_cluster_is_ejected() -> None:
    fleet = Fleet()
    fleet.loads = dict.fromkeys(fleet.loads, ALL_HANG)
    first = fleet.ejected()
    assert len(first) == 2
    assert fleet.ejected() == first, "places are not passed on while they hang"
    reasons = {each.reason for name, each in fleet.judge().items() if name not in first}
    assert reasons == {HealthReason.BUDGET}
    assert {name for name, each in fleet.judge().items() if each.is_ill} == first


def test_the_last_of_a_role_stays() -> None:
    fleet = Fleet(num_each=1)
    fleet.loads["d0"] = HANGS
    verdict = fleet.judge()[WorkerId("d0")]
    assert verdict == Verdict(Health.SUSPECT, HealthReason.LAST, HealthReason.HANGS)
    # Workers of another group or checkpoint cannot do its part.
    for name, change in (("e", {"scenario": "doc"}), ("f", {"model": "other"})):
        fleet.infos[name] = worker_info(name, Role.DECODE, **change)
        fleet.loads[name] = FINE
    verdict = fleet.judge()[WorkerId("d0")]
    assert (verdict.level, verdict.hangs, verdict.is_ill) == (Health.SUSPECT, True, True)
    fleet.infos["h"], fleet.loads["h"] = worker_info("h", Role.HYBRID), FINE
    assert fleet.level("d0") is Health.DEAD


def test_who_comes_back_is_tried_last_and_rests_longer_the_next_time() -> None:
    fleet = Fleet()
    rest_s = REST_S
    for _ in range(8):
        fleet.loads["p0"] = SLOW
        assert fleet.level("p0") is Health.DEGRADED
        ejected_at = fleet.now
        fleet.loads["p0"] = WorkerLoad()
        while fleet.level("p0") is Health.DEGRADED:
            assert fleet.now - ejected_at <= rest_s
        assert fleet.now - ejected_at == pytest.approx(rest_s, abs=1.0)
        assert fleet.level("p0") is Health.SUSPECT
        rest_s = min(2 * rest_s, MAX_REST_S)
    assert fleet.level("p0", PROBATION_S) is Health.OK


def test_who_is_silent_gets_nothing_until_it_reports_again() -> None:
    fleet = Fleet()
    fleet.silent = {WorkerId("d0"): SILENT_S * 0.9}
    assert fleet.level("d0") is Health.SUSPECT
    fleet.silent = {WorkerId("d0"): SILENT_S}
    verdict = fleet.judge()[WorkerId("d0")]
    assert (verdict.level, verdict.reason) == (Health.DEGRADED, HealthReason.SILENT)
    assert not verdict.is_ill, "its place is filled when its lease ends"
    fleet.silent = {}
    assert fleet.level("d0") is Health.OK, "at once, without a rest"


def test_where_all_are_silent_a_share_gets_nothing_and_the_last_stays() -> None:
    fleet = Fleet()
    fleet.silent = {WorkerId(name): SILENT_S for name in fleet.infos}
    assert len(fleet.ejected()) == 2
    pair = Fleet(num_each=1)
    pair.silent = {WorkerId("d0"): SILENT_S}
    assert pair.judge()[WorkerId("d0")].reason is HealthReason.LAST


def test_who_rests_is_ill_although_it_is_silent() -> None:
    fleet = Fleet()
    fleet.loads["d0"] = SLOW
    assert fleet.ejected() == {"d0"}
    fleet.silent = {WorkerId("d0"): SILENT_S}
    assert fleet.judge()[WorkerId("d0")].is_ill


def test_another_life_begins_well() -> None:
    fleet = Fleet()
    fleet.loads["p0"] = SLOW
    assert fleet.ejected() == {"p0"}
    fleet.infos["p0"] = dataclasses.replace(fleet.infos["p0"], incarnation=2)
    fleet.loads["p0"] = WorkerLoad()
    assert not fleet.ejected()


class Engine:
    """Steps in virtual time."""

    def __init__(self, draw: random.Random, step_s: Callable[[float], float]) -> None:
        self.watch = StepWatch()
        self._draw = draw
        self._step_s = step_s
        self._ends_at: float | None = None

    def load(self, now: float) -> WorkerLoad:
        """What is reported at `now`, after all steps that ended before."""
        at = now if self._ends_at is None else self._ends_at
        while self._ends_at is None or self._ends_at <= now:
            if self._ends_at is not None:
                at = self._ends_at
                self.watch.end(at)
            is_prompt = self._draw.random() < 0.3
            self.watch.begin(PROMPT if is_prompt else DECODE, at)
            self._ends_at = at + self._step_s(at) * (2.0 if is_prompt else 1.0)
        steps = self.watch.state(now)
        return WorkerLoad(
            step_age_s=steps.age_s, step_expected_s=steps.expected_s, slowdown=steps.slowdown
        )


def test_an_hour_of_steps_of_five_seconds_ejects_nobody() -> None:
    """Steps vary by half, and one in fifty takes three times as long."""
    draw = random.Random(1)

    def step_s(_: float) -> float:
        return 5.0 * draw.uniform(0.75, 1.25) * (3.0 if draw.random() < 0.02 else 1.0)

    fleet = Fleet()
    engines = {name: Engine(draw, step_s) for name in fleet.infos}
    while fleet.now < 3600:
        fleet.loads = {name: each.load(fleet.now + 0.5) for name, each in engines.items()}
        assert not fleet.ejected(), fleet.loads


@pytest.mark.parametrize("factor", [10.0, 1e9], ids=["tenfold", "hangs"])
def test_a_fault_ejects_within_three_seconds(factor: float) -> None:
    draw, begins_at = random.Random(2), 60.0

    def step_s(now: float, *, ill: bool = False) -> float:
        return 0.05 * draw.uniform(0.75, 1.25) * (factor if ill and now >= begins_at else 1.0)

    fleet = Fleet()
    engines = {name: Engine(draw, step_s) for name in fleet.infos}
    engines["d2"] = Engine(draw, lambda now: step_s(now, ill=True))
    ejected: set[str] = set()
    while not ejected:
        assert fleet.now < begins_at + 2.5, "0.5 s are left for what is between a report and a view"
        fleet.loads = {name: each.load(fleet.now + 0.5) for name, each in engines.items()}
        ejected = fleet.ejected()
        assert fleet.now > begins_at or not ejected
    assert ejected == {"d2"}
    assert HANG_FACTOR * 0.05 < HANG_S


def test_who_cannot_be_ill_is_judged_as_if_all_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over random histories, in which steps hang and gateways lose requests."""

    def history() -> list[dict[WorkerId, Verdict]]:
        fleet, draw, told = Fleet(num_each=6), random.Random(3), []
        for _ in range(200):
            name = draw.choice(list(fleet.infos))
            fleet.loads[name] = WorkerLoad(
                step_age_s=draw.choice((0.0, 0.0, 0.5, 2.0)),
                step_expected_s=draw.choice((0.0, 0.05)),
                slowdown=draw.choice((0.0, 1.0, 2.9, 3.1, 9.0)),
                draining=draw.random() < 0.1,
                damaged_total=fleet.loads[name].damaged_total + (draw.random() < 0.1),
            )
            for note in (fleet.board.note_lost, fleet.board.note_refused):
                if draw.random() < 0.3:
                    note(WorkerId(draw.choice(list(fleet.infos))), fleet.now)
            told.append(fleet.judge())
        return told

    found = history()
    assert {each.level for told in found for each in told.values()} == set(Health)
    monkeypatch.setattr("kvmesh.policy.health._Record.is_fine_with", lambda *_: False)
    assert found == history()


def test_the_time_to_judge_a_silent_part_of_the_fleet_grows_with_the_fleet_only() -> None:
    def seconds(num_each: int) -> float:
        fleet = Fleet(num_each=num_each)
        fleet.silent = {WorkerId(f"d{n}"): SILENT_S for n in range(num_each // 2)}
        started = time.process_time()
        found = fleet.judge()
        took = time.process_time() - started
        assert sum(each.fault is HealthReason.SILENT for each in found.values()) == num_each // 2
        return took

    few, many = (min(seconds(count) for _ in range(5)) for count in (100, 1600))
    assert many < 100 * few, "a comparison of all with all takes 256 times as long"
