from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvmesh.console.request_log import Moment, RequestLog
from kvmesh.console.sampler import Sampler, Totals
from kvmesh.console.snapshot import ConsoleView, flows, history, phases, snapshot, timeline
from kvmesh.core.types import LinkDetail, Placement, RequestId, Role, WorkerDetail
from tests.unit.console.examples import D0, P0, finished, fleet_worker, with_detail

REFUSALS = {("decode", "no_slots"): 2.0, ("prefill", "busy"): 7.0}


def view_of(log: RequestLog, *workers: Any) -> ConsoleView:
    sampler = Sampler(log)
    sampler.take(workers, Totals(REFUSALS), 1.0)
    return ConsoleView("m", "0", True, workers, REFUSALS, log, sampler)


def test_a_snapshot_is_json_and_shows_everything() -> None:
    log = RequestLog(unix_offset_s=100.0)
    finished(log, "done")
    log.open(RequestId("open"), 5, 9.0)
    link = LinkDetail(D0, "tcp", 1000, 7, 0.5, 1e9, 0.001, 3, 1)
    fleet = (
        with_detail(fleet_worker("p0", blocks_free=200), link),
        fleet_worker("d0", Role.DECODE, decode_running=2, decode_reserved=1),
    )
    shown = json.loads(json.dumps(snapshot(view_of(log, *fleet), 10.0)))
    assert shown["now"] == 110.0
    assert [each["id"] for each in shown["workers"]] == ["d0", "p0"]
    assert [each["id"] for each in shown["requests"]] == ["open", "done"]
    assert shown["refusals"][0] == {"stage": "prefill", "reason": "busy", "count": 7}
    assert shown["links"] == [
        {
            "from": "p0",
            "to": "d0",
            "channel": "tcp",
            "bytes_total": 1000,
            "bytes_s": 0,
            "goodput_bytes_s": 2000,
            "budget_bytes_s": 1e9,
            "queued_bytes": 7,
            "rtt_ms": 1.0,
            "retransmits": 3,
            "failed_total": 1,
        }
    ]
    assert shown["sample"] == history(view_of(log, *fleet).sampler.samples)[-1]


def test_a_worker_shows_why_nothing_is_routed_to_it() -> None:
    worker = dataclasses.replace(
        fleet_worker("p0", draining=True), detail=WorkerDetail(cordoned=True)
    )
    shown = snapshot(view_of(RequestLog(), worker, fleet_worker("p1", draining=True)), 1.0)
    assert [each["state"] for each in shown["workers"]] == ["cordoned", "draining"]


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
