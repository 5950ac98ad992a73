from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvmesh.console.request_log import RequestLog
from kvmesh.console.sampler import Sampler
from kvmesh.console.share import share_of
from kvmesh.console.snapshot import ConsoleView, history, snapshot
from kvmesh.core.details import ANSWER, ASK, COPY, GET, LinkDetail, WorkerDetail
from kvmesh.core.types import RequestId, Role
from tests.unit.console.examples import D0, finished, fleet_worker, with_detail

REFUSALS = {("decode", "no_slots"): 2.0, ("prefill", "busy"): 7.0}


def view_of(log: RequestLog, *workers: Any) -> ConsoleView:
    sampler = Sampler()
    share = share_of(log, REFUSALS, 10.0, with_rows=True)
    sampler.take(workers, share, 1.0)
    return ConsoleView(110.0, "m", "0", True, workers, share, sampler)


def test_a_snapshot_is_json_and_shows_everything() -> None:
    log = RequestLog(unix_offset_s=100.0)
    finished(log, "done")
    log.open(RequestId("open"), 5, 9.0)
    link = LinkDetail(D0, "tcp", 1000, 7, 0.5, 1e9, 0.001, 3, 1)
    fleet = (
        with_detail(fleet_worker("p0", blocks_free=200), link),
        fleet_worker("d0", Role.DECODE, decode_running=2, decode_reserved=1),
    )
    shown = json.loads(json.dumps(snapshot(view_of(log, *fleet))))
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


def test_reads_and_answers_are_shown_from_their_holder() -> None:
    links = [LinkDetail(D0, channel) for channel in ("tcp", GET, COPY, ANSWER, ASK)]
    shown = snapshot(view_of(RequestLog(), with_detail(fleet_worker("p0"), *links)))
    ends = {each["channel"]: (each["from"], each["to"]) for each in shown["links"]}
    out, back = ("p0", "d0"), ("d0", "p0")
    assert ends == {"tcp": out, ASK: out, GET: back, COPY: back, ANSWER: back}


def test_a_worker_shows_why_nothing_is_routed_to_it() -> None:
    worker = dataclasses.replace(
        fleet_worker("p0", draining=True), detail=WorkerDetail(cordoned=True)
    )
    shown = snapshot(view_of(RequestLog(), worker, fleet_worker("p1", draining=True)))
    assert [each["state"] for each in shown["workers"]] == ["cordoned", "draining"]


def test_a_worker_shows_what_it_runs_without() -> None:
    fast = fleet_worker("p0")
    slow = dataclasses.replace(
        fast, info=dataclasses.replace(fast.info, missing_native=("kernels",))
    )
    for worker, missing in ((fast, []), (slow, ["kernels"])):
        [row] = snapshot(view_of(RequestLog(), worker))["workers"]
        assert row["missing_native"] == missing


def test_a_worker_that_left_is_told_apart() -> None:
    view = view_of(RequestLog(), fleet_worker("d0", Role.DECODE))
    view.sampler.take([], view.share, 100.0)
    shown = snapshot(dataclasses.replace(view, workers=()))
    assert shown["workers"] == []
    assert shown["gone"] == [{"id": "d0", "role": "decode", "cluster": "east", "for_s": 10.0}]
