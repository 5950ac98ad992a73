from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import (
    BlockHash,
    Placement,
    PrefixMatch,
    Refusal,
    Role,
    RoutePlan,
    WorkerId,
    WorkerInfo,
)
from kvmesh.policy.ranking import POLICIES
from services.scheduler.fleet import Fleet
from services.scheduler.router import Router, RouterSettings
from tests.unit.policy.fleet_examples import LAYOUT, query, worker_info

HASHES = (BlockHash(bytes(16)),)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True)
class Answer:
    matches: tuple[PrefixMatch, ...]
    known: bool = True


class Prefixes:
    """Answers by namespace and remembers what it was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.asked: list[tuple[str, float]] = []

    async def match(self, namespace: str, hashes: Sequence[BlockHash], timeout_s: float) -> Answer:
        self.asked.append((namespace, timeout_s))
        return self.answers[namespace]


def make_router(fleet: Fleet, prefixes: Prefixes | None = None) -> Router:
    settings = RouterSettings(POLICIES["cache_load"], Placement.AUTO, match_timeout_s=0.05)
    return Router(fleet, settings, prefixes, ManualClock(), random.Random(0))


def fleet_of(*infos: WorkerInfo) -> Fleet:
    fleet = Fleet(3.0)
    for info in infos:
        fleet.register(info, 0.0)
    return fleet


def count(outcome: str, placement: str) -> float:
    labels = {"outcome": outcome, "placement": placement}
    return REGISTRY.get_sample_value("kvmesh_scheduler_routes_total", labels) or 0.0


async def test_every_namespace_of_the_model_is_asked() -> None:
    other = worker_info("h2", Role.HYBRID, layout=type(LAYOUT)("new", "float32", 16, 2, 2, 32))
    fleet = fleet_of(worker_info("h1", Role.HYBRID), other, worker_info("x", model="n"))
    prefixes = Prefixes(
        fingerprint=Answer(()),
        new=Answer((PrefixMatch(WorkerId("h2"), 1, "east", 7),)),
    )
    plan = await make_router(fleet, prefixes).route(query(block_hashes=HASHES), "")
    assert isinstance(plan, RoutePlan)
    assert plan.cache_known
    assert plan.prefill[0].worker_id == "h2"
    assert plan.prefill[0].cached_tokens == 7 * 16
    assert prefixes.asked == [("fingerprint", 0.05), ("new", 0.05)]


async def test_unknown_matches_make_a_plan_without_cache_knowledge() -> None:
    fleet = fleet_of(worker_info("h1", Role.HYBRID))
    prefixes = Prefixes(fingerprint=Answer((), known=False))
    plan = await make_router(fleet, prefixes).route(query(block_hashes=HASHES), "")
    assert isinstance(plan, RoutePlan)
    assert not plan.cache_known


async def test_outcomes_are_counted() -> None:
    plans, refusals = count("plan", "aggregated"), count("no_workers", "auto")
    await make_router(fleet_of(worker_info("h", Role.HYBRID))).route(query(), "")
    outcome = await make_router(fleet_of()).route(query(), "")
    assert isinstance(outcome, Refusal)
    assert count("plan", "aggregated") == plans + 1
    assert count("no_workers", "auto") == refusals + 1


async def test_span_is_a_child_of_the_query_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    fleet = fleet_of(worker_info("h", Role.HYBRID))
    plan = await make_router(fleet).route(query(), TRACEPARENT)
    assert isinstance(plan, RoutePlan)
    (span,) = exporter.get_finished_spans()
    assert span.name == "scheduler.route"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" in TRACEPARENT
    assert span.attributes is not None
    assert span.attributes["reason"] == plan.reason
    provider.shutdown()
