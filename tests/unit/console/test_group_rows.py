from __future__ import annotations

import dataclasses
import json

from kvmesh.console.group_rows import group_rows
from kvmesh.console.request_log import RequestLog
from kvmesh.console.sampler import WorkerRates
from kvmesh.console.share import Share, share_of
from kvmesh.core.details import FleetWorker
from kvmesh.core.types import Placement, RequestId, Role, WorkerId
from tests.unit.console.examples import D0, P0, finished, fleet_worker


def of_scenario(worker: FleetWorker, scenario: str) -> FleetWorker:
    return dataclasses.replace(worker, info=dataclasses.replace(worker.info, scenario=scenario))


def test_each_group_has_its_own_workers_and_requests() -> None:
    prefill = of_scenario(fleet_worker("p0", prefill_active=1), "chat")
    decode = of_scenario(fleet_worker("d0", Role.DECODE, decode_running=2, draining=True), "chat")
    other = of_scenario(fleet_worker("x", blocks_free=0), "doc")
    log = RequestLog()
    finished(log, "done")
    log.open(RequestId("open"), 5, 1.0).placed(1.5, Placement.DISAGGREGATED, P0, D0)
    elsewhere = log.open(RequestId("elsewhere"), 5, 1.0)
    elsewhere.placed(1.5, Placement.AGGREGATED, WorkerId("x"), WorkerId(""))
    log.open(RequestId("waiting"), 5, 1.0)
    share = share_of(log, {}, 2.0, with_rows=True)
    rates = {P0: WorkerRates(7.0, 0.0), D0: WorkerRates(0.0, 3.0)}
    rows = json.loads(json.dumps(group_rows([decode, other, prefill], rates, share)))
    chat, doc = rows
    info = prefill.info
    assert (chat["name"], doc["name"]) == ("chat@east", "doc@east")
    assert chat["checkpoint"] == info.layout.model_fingerprint[:8]
    assert chat["workers"] == {"prefill": 1, "decode": 1, "hybrid": 0, "spare": 0}
    assert (chat["ready"], doc["ready"]) == (1, 1)
    assert (chat["open"], doc["open"]) == (1, 1)
    assert chat["prefill"]["active"] == 1
    assert chat["decode"] == {"active": 2, "slots": 2 * info.decode_slots}
    assert (chat["ttft_p50_ms"], doc["ttft_p50_ms"]) == (3000.0, None)
    assert (chat["prefill_tokens_s"], chat["decode_tokens_s"]) == (7.0, 3.0)
    assert doc["blocks"] == {"total": info.num_blocks, "used": info.num_blocks}


def test_requests_of_workers_that_left_are_in_no_group() -> None:
    share = Share(ttfts=(("gone", 1.0),), flows=({"prefill": "gone", "decode": "", "count": 1},))
    [row] = group_rows([fleet_worker("p0")], {}, share)
    assert (row["open"], row["ttft_p99_ms"]) == (0, None)
    assert row["name"] == "any@east"
    assert group_rows([], {}, share) == []
