from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvmesh.core.types import (
    Candidate,
    Placement,
    Refusal,
    RefusalReason,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.late import LEAST_RETRY_MS, late_refusal
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.view import FleetView, WorkerView
from tests.unit.policy.fleet_examples import query, worker

TOKEN_S = 0.001
LONG = 3000
WITH_LIMIT = query(LONG, ttft_budget_ms=2000)


def plan(name: str = "p0", cached: int = 0, **changes: Any) -> RoutePlan:
    info = worker(name).info
    first = Candidate(info.worker_id, 1, info.control_endpoint, cached)
    second = dataclasses.replace(first, worker_id=WorkerId("d0"))
    made = RoutePlan(Placement.DISAGGREGATED, (first,), (second,), True, "", "kvmesh")
    return dataclasses.replace(made, **changes)


def holds(name: str, role: Role = Role.PREFILL, **changes: Any) -> WorkerView:
    return dataclasses.replace(worker(name, role), **changes)


def view(*workers: WorkerView, token_s: float = TOKEN_S) -> FleetView:
    return FleetView((*workers, worker("d0", Role.DECODE)), pace=FetchPace(token_s))


BUSY = view(worker("p0"), holds("p1", pending_tokens=1))


def test_a_prompt_that_would_be_late_gives_way_to_others() -> None:
    refused = late_refusal(plan(), BUSY, WITH_LIMIT)
    assert isinstance(refused, Refusal)
    assert refused.reason is RefusalReason.DEADLINE
    assert "in 3000 ms, 2000 ms of its limit are left" in refused.message
    assert refused.retry_after_ms == 1000


def test_it_is_served_late_where_it_delays_nobody() -> None:
    assert late_refusal(plan(), view(worker("p0"), worker("p1")), WITH_LIMIT) is None
    decodes = view(worker("p0"), holds("d1", Role.DECODE, pending_tokens=1))
    assert late_refusal(plan(), decodes, WITH_LIMIT) is None, "helpers are not waited for"


def test_hybrids_refuse_late_prompts_as_well() -> None:
    route = plan("h0", placement=Placement.AGGREGATED, decode=())
    idle, busy = holds("h0", Role.HYBRID), holds("h0", Role.HYBRID, pending_tokens=9)
    assert late_refusal(route, FleetView((busy,), pace=FetchPace(TOKEN_S)), WITH_LIMIT) is not None
    assert late_refusal(route, FleetView((idle,), pace=FetchPace(TOKEN_S)), WITH_LIMIT) is None


def test_prompts_before_it_count_and_its_prefix_does_not() -> None:
    half = dataclasses.replace(WITH_LIMIT, num_tokens=1500)
    ahead = view(holds("p0", pending_tokens=400))
    assert late_refusal(plan(), ahead, half) is None
    assert late_refusal(plan(), view(holds("p0", pending_tokens=600)), half) is not None
    assert late_refusal(plan(), view(holds("p0", prefill_in_flight=1)), half) is not None
    assert late_refusal(plan(cached=1024), BUSY, WITH_LIMIT) is None
    barely = late_refusal(plan(), view(holds("p0", pending_tokens=501)), half)
    assert barely is not None
    assert barely.retry_after_ms == LEAST_RETRY_MS


@pytest.mark.parametrize(
    ("route", "fleet", "asked"),
    [
        (plan(), BUSY, query(LONG)),
        (plan(), view(*BUSY.workers[:2], token_s=0.0), WITH_LIMIT),
        (plan(), dataclasses.replace(BUSY, pace=FetchPace(TOKEN_S, reach_tokens=2999)), WITH_LIMIT),
        (plan(remote=True), BUSY, WITH_LIMIT),
        (plan(cause=RouteCause.CHAIN), BUSY, WITH_LIMIT),
        (plan("gone"), BUSY, WITH_LIMIT),
    ],
    ids=["no limit", "no speed", "longer than measured ones", "remote", "chain", "gone"],
)
def test_nothing_is_refused_that_cannot_be_predicted(
    route: RoutePlan, fleet: FleetView, asked: RouteQuery
) -> None:
    assert late_refusal(route, fleet, asked) is None
