from __future__ import annotations

from kvmesh.console.request_log import MAX_EVENTS, Moment, RequestLog, Stage
from kvmesh.core.types import Placement, RequestId
from tests.unit.console.examples import D0, P0, finished


def test_a_request_goes_through_its_stages() -> None:
    log = RequestLog()
    trace = log.open(RequestId("r"), 10, 0.0)
    stages = [trace.stage]
    trace.placed(1.0, Placement.DISAGGREGATED, P0, D0)
    stages.append(trace.stage)
    for moment in (Moment.FIRST_TOKEN, Moment.HANDED_OFF, Moment.LOST):
        trace.note(moment, 2.0)
        stages.append(trace.stage)
    assert stages == [Stage.WAITING, Stage.PREFILL, Stage.HANDOFF, Stage.DECODE, Stage.WAITING]
    assert trace.num_moves == 1
    assert log.num_open == 1
    log.end(RequestId("r"), 3.0, "stop")
    assert (trace.stage, trace.finish, trace.ended_at) == (Stage.ENDED, "stop", 3.0)
    assert log.num_open == 0


def test_only_the_last_ones_are_remembered() -> None:
    log = RequestLog(capacity=2)
    for name in "abc":
        finished(log, name)
    assert [each.request_id for each in log.latest()] == ["c", "b"]
    assert log.find("a") is None
    assert log.arrived_total == log.ended_total == 3


def test_a_client_finds_its_request_by_its_own_id() -> None:
    log = RequestLog()
    finished(log, "mine-0a1b2c3d-0")
    again = finished(log, "mine-99999999-0")
    assert log.find("mine") is again
    assert log.find("mine-0a1b2c3d-0") is not again
    assert log.find("min") is None
    assert log.find("") is None


def test_an_endless_search_for_workers_stays_small_and_its_end_is_kept() -> None:
    trace = RequestLog().open(RequestId("r"), 10, 0.0)
    for number in range(10 * MAX_EVENTS):
        trace.note(Moment.ROUTED, number)
        trace.note(Moment.REFUSED, number)
    trace.placed(1e6, Placement.DISAGGREGATED, P0, D0)
    assert len(trace.events) == MAX_EVENTS + 1
    assert trace.events[-1].moment is Moment.ACCEPTED
    assert trace.num_refusals == 10 * MAX_EVENTS


def test_a_request_that_nobody_opened_leaves_nothing() -> None:
    log = RequestLog()
    log.trace(RequestId("ghost")).note(Moment.ROUTED, 1.0)
    log.end(RequestId("ghost"), 2.0, "stop")
    assert (log.num_open, log.ended_total) == (0, 0)
    assert log.find("ghost") is None
