from __future__ import annotations

from kvmesh.console.request_log import Moment, RequestLog
from kvmesh.console.rows import flows, phases, timeline
from kvmesh.core.types import Placement, RequestId
from tests.unit.console.examples import D0, P0, finished


def test_flows_count_requests_by_stage_and_pair() -> None:
    log = RequestLog()
    for name in ("a", "b"):
        trace = log.open(RequestId(name), 5, 0.0)
        trace.placed(1.0, Placement.DISAGGREGATED, P0, D0)
    log.open(RequestId("c"), 5, 0.0)
    assert flows(log.running()) == [
        {"stage": "prefill", "prefill": "p0", "decode": "d0", "count": 2},
        {"stage": "waiting", "prefill": "", "decode": "", "count": 1},
    ]


def test_phases_follow_each_other_without_gaps() -> None:
    trace = finished(RequestLog(), "r", at=50.0)
    found = phases(trace, 99.0)
    assert [(each["phase"], each["worker"]) for each in found] == [
        ("waiting", ""),
        ("prefill", "p0"),
        ("handoff", "p0"),
        ("decode", "d0"),
    ]
    assert [each["start_ms"] for each in found] == [0.0, 1000.0, 3000.0, 3500.0]
    assert [each["end_ms"] for each in found] == [1000.0, 3000.0, 3500.0, 7500.0]


def test_a_move_begins_again() -> None:
    log = RequestLog()
    trace = log.open(RequestId("r"), 5, 0.0)
    trace.placed(1.0, Placement.DISAGGREGATED, P0, D0)
    trace.note(Moment.FIRST_TOKEN, 2.0, P0)
    trace.note(Moment.HANDED_OFF, 3.0, D0)
    trace.note(Moment.LOST, 4.0, D0, "decode_failed")
    assert [each["phase"] for each in phases(trace, 9.0)] == [
        "waiting",
        "prefill",
        "handoff",
        "decode",
        "waiting",
    ]
    shown = timeline(trace, log, 9.0)
    assert shown["phases"][-1]["end_ms"] == 9000.0
    assert shown["events"][-1] == {
        "at_ms": 4000.0,
        "what": "lost",
        "worker": "d0",
        "text": "decode_failed",
    }
    assert (shown["moves"], shown["ttft_ms"]) == (1, 2000.0)
