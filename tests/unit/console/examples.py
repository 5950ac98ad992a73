"""Workers and requests for the tests of the console."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvmesh.console.request_log import Moment, RequestLog, RequestTrace
from kvmesh.core.details import FleetWorker, LinkDetail, WorkerDetail
from kvmesh.core.types import Placement, RequestId, Role, WorkerId, WorkerLoad
from tests.unit.policy.fleet_examples import worker_info

P0, D0 = WorkerId("p0"), WorkerId("d0")


def fleet_worker(
    name: str, role: Role = Role.PREFILL, incarnation: int = 1, **load: Any
) -> FleetWorker:
    info = worker_info(name, role, incarnation=incarnation)
    return FleetWorker(info, WorkerLoad(**{"blocks_free": info.num_blocks, **load}))


def with_detail(
    worker: FleetWorker, *links: LinkDetail, prompt: int = 0, cached: int = 0
) -> FleetWorker:
    detail = WorkerDetail(
        prompt_tokens_total=prompt, cached_tokens_total=cached, links=tuple(links)
    )
    return dataclasses.replace(worker, detail=detail)


def finished(
    log: RequestLog, name: str, *, at: float = 0.0, placement: Placement = Placement.DISAGGREGATED
) -> RequestTrace:
    """A request that waits 1 s, is prefilled in 2 s, handed over in 0.5 s, decoded in 4 s."""
    trace = log.open(RequestId(name), 100, at)
    trace.note(Moment.ROUTED, at + 0.1, text="because")
    trace.note(Moment.REFUSED, at + 0.5, P0, "prefill: busy")
    trace.placed(at + 1, placement, P0, D0)
    trace.note(Moment.FIRST_TOKEN, at + 3, P0)
    trace.note(Moment.HANDED_OFF, at + 3.5, D0)
    log.end(trace.request_id, at + 7.5, "length")
    return trace
