from __future__ import annotations

import json

from kvmesh.console.request_log import RequestLog
from kvmesh.console.share import (
    MAX_REQUESTS,
    WINDOW_S,
    Share,
    added,
    share_from_json,
    share_of,
    share_to_json,
)
from kvmesh.core.types import Placement, RequestId
from tests.unit.console.examples import D0, P0, finished

BUSY = {("prefill", "busy"): 2.0}


def test_times_and_placements_are_of_the_window() -> None:
    log = RequestLog()
    finished(log, "old", at=-WINDOW_S, placement=Placement.AGGREGATED)
    for number in range(3):
        finished(log, f"new-{number}", at=10.0)
    share = share_of(log, BUSY, 20.0, with_rows=False)
    assert share.ttfts_s == (3.0,) * 3
    assert share.disaggregated_share == 1.0
    assert (share.arrived_total, share.refusals, share.requests) == (4, BUSY, ())
    finished(log, "local", at=10.0, placement=Placement.AGGREGATED)
    assert share_of(log, BUSY, 20.0, with_rows=False).disaggregated_share == 0.75
    assert Share().disaggregated_share is None


def one(name: str, *, at: float, is_open: bool = False) -> Share:
    log = RequestLog(unix_offset_s=1000.0)
    finished(log, name, at=at)
    if is_open:
        log.open(RequestId(f"{name}-open"), 5, at).placed(at, Placement.AGGREGATED, P0, D0)
    return share_of(log, BUSY, at + 9.0, with_rows=True)


def test_shares_of_processes_add_up() -> None:
    both = added((one("a", at=1.0, is_open=True), one("b", at=2.0, is_open=True)))
    assert (both.num_open, both.arrived_total, both.ended_total) == (2, 4, 2)
    assert both.refusals == {("prefill", "busy"): 4.0}
    assert both.flows == ({"stage": "prefill", "prefill": "p0", "decode": "d0", "count": 2},)
    assert [row["id"] for row in both.requests] == ["b-open", "a-open", "b", "a"]
    assert len(both.ttfts_s) == 2
    assert added(()) == Share()


def test_rows_stay_bounded() -> None:
    log = RequestLog()
    for number in range(MAX_REQUESTS):
        finished(log, str(number), at=float(number))
    share = share_of(log, {}, 200.0, with_rows=True)
    both = added((share, share))
    assert len(share.requests) == len(both.requests) == MAX_REQUESTS
    assert both.requests[0]["id"] == str(MAX_REQUESTS - 1)


def test_a_share_survives_the_way_between_processes() -> None:
    share = one("a", at=1.0, is_open=True)
    assert share_from_json(json.loads(json.dumps(share_to_json(share)))) == share


def test_of_a_process_that_ended_the_totals_are_left() -> None:
    past = one("a", at=1.0, is_open=True).past()
    assert (past.num_open, past.arrived_total, past.ended_total) == (0, 2, 2)
    assert (past.refusals, past.requests, past.flows) == (BUSY, (), ())
