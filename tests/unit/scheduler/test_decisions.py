from __future__ import annotations

import json
from functools import partial

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import Placement, RequestId
from kvmesh.policy.explain import DecisionFacts
from kvmesh.runtime.admin import showing
from services.scheduler.decisions import DecisionLog


def facts(name: str) -> DecisionFacts:
    return DecisionFacts(
        request_id=RequestId(name),
        policy="kvmesh",
        placement=Placement.AGGREGATED,
        reason="asked",
        detail="",
        num_tokens=1,
        prefill=(),
        decode=(),
        threshold_tokens=None,
        compared_tokens=0,
        cache_known=True,
        num_seen=1,
    )


def log_of(*names: str, capacity: int = 3) -> DecisionLog:
    clock = ManualClock()
    log = DecisionLog(clock, capacity)
    for name in names:
        log.add(RequestId(name), partial(facts, name))
        clock.advance(1.0)
    return log


def test_the_newest_push_out_the_oldest() -> None:
    log = log_of("a", "b", "c", "d")
    assert [each.request_id for each in log.routes()] == ["d", "c", "b"]
    shown = log.as_json()
    assert shown["num_routes"] == 4
    assert [each["age_s"] for each in shown["routes"]] == [1.0, 2.0, 3.0]
    json.dumps(shown)


def test_capacity_zero_keeps_none() -> None:
    assert log_of("a", capacity=0).as_json() == {"num_routes": 1, "routes": [], "fleet": []}


def test_fleet_decisions_are_apart() -> None:
    log = log_of("a")
    log.add_fleet("roles", "idle", worker_id="p", role="decode")
    assert log.as_json()["fleet"] == [
        {"age_s": 0.0, "kind": "roles", "reason": "idle", "worker_id": "p", "role": "decode"}
    ]


async def test_over_http() -> None:
    app = web.Application()
    app.router.add_get("/debug/decisions", showing(log_of("a", "b", "c").shown))
    async with TestClient(TestServer(app)) as client:
        body = await (await client.get("/debug/decisions?limit=2")).json()
        assert [each["request_id"] for each in body["routes"]] == ["c", "b"]
        assert body["routes"][0]["placement"] == "aggregated"
        body = await (await client.get("/debug/decisions?request=a")).json()
        assert [each["request_id"] for each in body["routes"]] == ["a"]
        assert (await client.get("/debug/decisions?limit=-1")).status == 400
