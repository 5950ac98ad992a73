"""Makes one route plan: prefix lookup, the pure decision, metrics and span.

Tests: tests/unit/scheduler/test_router.py.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from kvmesh.core.clock import Clock
from kvmesh.core.types import (
    Placement,
    Refusal,
    RoutePlan,
    RouteQuery,
)
from kvmesh.core.values import changed
from kvmesh.policy.composition import Composition, decide_route
from kvmesh.policy.explain import describe_decision
from kvmesh.policy.groups import serving_label
from kvmesh.policy.joint import Ask, decide_jointly, hold_s, in_turn
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.policy.recent_reads import RecentReads
from kvmesh.policy.view import FleetView
from kvmesh.telemetry.logs import event_logger
from kvmesh.telemetry.tracing import Span, start_span
from services.scheduler import metrics
from services.scheduler.decisions import DecisionLog
from services.scheduler.fleet import Fleet
from services.scheduler.gathering import JointDecisions, Waiting
from services.scheduler.knowledge import PrefixIndex, PrefixKnowledge, PrefixMatcher
from services.scheduler.planner import Planner

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of a router, from the config.

    Attributes:
        placement: placement of queries that do not choose one.
        match_timeout_s: longest time that a plan waits for prefix matches.
    """

    policy: Composition
    placement: Placement
    match_timeout_s: float


class Router:
    """Answers route queries from the fleet.

    Args:
        prefixes: finds the workers that hold a prefix while the index does not know; None routes
            without cache knowledge.
        decisions: logs every decision with its inputs.
        planner: has the threshold in force, and learns from every route.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        prefixes: PrefixMatcher | None,
        clock: Clock,
        decisions: DecisionLog,
        planner: Planner,
        index: PrefixIndex | None = None,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._knowledge = PrefixKnowledge(fleet, prefixes, index, settings.match_timeout_s)
        self._clock = clock
        self._decisions = decisions
        self._planner = planner
        self._reads = RecentReads()
        self._joint: dict[tuple[str, str], JointDecisions] = {}

    @property
    def num_waiting(self) -> int:
        """Queries that wait for a joint decision with others."""
        return sum(each.num_waiting for each in self._joint.values())

    async def route(
        self, query: RouteQuery, traceparent: str, gateway: Hashable = None
    ) -> RoutePlan | Refusal:
        """Decides, and counts the plan as load of the chosen workers.

        Args:
            gateway: identity of the gateway that asks. The latest query of each gateway tells how
                many requests wait there.
        """
        started = time.perf_counter()
        if query.placement is Placement.AUTO is not self._settings.placement:
            query = changed(query, placement=self._settings.placement)
        self._fleet.withdraw(query.request_id)  # it asks again, so no worker took its last plan
        with start_span("scheduler.route", traceparent, request_id=query.request_id) as span:
            outcome = await self._outcome(self._to_adapter(query))
            plan = outcome if isinstance(outcome, RoutePlan) else None
            self._planner.note_route(gateway, query, plan)
            _describe(span, query, outcome)
        metrics.ROUTE_SECONDS.observe(time.perf_counter() - started)
        return outcome

    def forget(self, gateway: Hashable) -> None:
        """Forgets the waiting requests of a gateway that is gone."""
        self._planner.demand.forget(gateway)

    def _to_adapter(self, query: RouteQuery) -> RouteQuery:
        """The query, which takes workers without its adapter last: they would refuse it."""
        if not query.adapter:
            return query
        without = self._fleet.lacking(query.model, query.adapter)
        return changed(query, avoid=query.avoid | without) if without else query

    async def _outcome(self, query: RouteQuery) -> RoutePlan | Refusal:
        if self._settings.policy.joint is None:
            return self._decide(Waiting(query, await self._knowledge.of(query)))
        # One per model and scenario: a query gains nothing by waiting for queries that other
        # workers serve.
        labels = self._fleet.labels(query.model)
        group = query.model, serving_label(query.scenario, labels)
        decisions = self._joint.get(group)
        if decisions is None:
            decisions = JointDecisions(self._hold_s, self._decide_together)
            self._joint[group] = decisions
        try:
            return await decisions.decided(self._looked_up(query))
        finally:
            if not decisions.num_waiting and self._joint.get(group) is decisions:
                del self._joint[group]

    async def _looked_up(self, query: RouteQuery) -> Waiting:
        known = await self._knowledge.of(query)
        return Waiting(query, known, time.perf_counter())

    def _decide(self, waiting: Waiting) -> RoutePlan | Refusal:
        started, now = time.perf_counter(), self._clock.now()
        query = waiting.query
        ask = self._ask(waiting, now)
        offload = self._planner.offload(query.model)
        decision = decide_route(self._settings.policy, ask.view, query, ask.matches, now, offload)
        self._take(waiting, ask, decision, offload, now)
        metrics.DECISION_SECONDS.observe(time.perf_counter() - started)
        return decision.route

    def _decide_together(
        self, waiting: Sequence[Waiting]
    ) -> list[tuple[Waiting, RoutePlan | Refusal]]:
        """Decides on queries of one group together. The prompts computed first come first."""
        started, now = time.perf_counter(), self._clock.now()
        # Sorted by request id, so that the order of arrival does not influence the decision.
        members = sorted(waiting, key=lambda each: each.query.request_id)
        offload = self._planner.offload(members[0].query.model)
        asks = [self._ask(each, now) for each in members]
        plans = decide_jointly(self._settings.policy, asks, now, offload)
        for each, ask, decision in zip(members, asks, plans, strict=True):
            self._take(each, ask, decision, offload, now)
        for each in members:
            metrics.JOINT_HELD_SECONDS.observe(started - each.since)
        metrics.note_joint(plans)
        metrics.DECISION_SECONDS.observe(time.perf_counter() - started)
        return [(each, plan.route) for each, plan in in_turn(members, plans)]

    def _hold_s(self, waiting: Waiting) -> float:
        now = self._clock.now()
        offload = self._planner.offload(waiting.query.model)
        return hold_s(self._settings.policy, self._ask(waiting, now), now, offload)

    def _ask(self, waiting: Waiting, now: float) -> Ask:
        """A query with the inputs of its decision."""
        query, matches = waiting.query, waiting.known.matches
        policy = self._settings.policy
        view: FleetView
        if policy.orders_by_load:
            view = self._fleet.view_for(query, matches, now)
        else:
            view = self._fleet.view(now)
        if policy.route.fetches and (matches or policy.joint is not None):
            reads = self._reads.among(view.workers, matches)
            view = changed(view, pace=self._planner.pace(query.model), reads=reads)
        elif policy.refuses_late:
            view = changed(view, pace=self._planner.pace(query.model))
        if policy.route.weighs_links and (links := self._planner.links(query.model)):
            view = changed(view, links=links)
        return Ask(query, view, matches)

    def _take(
        self,
        waiting: Waiting,
        ask: Ask,
        decision: OffloadPlan,
        offload: OffloadState,
        now: float,
    ) -> None:
        """Logs a decision, and counts its plan as load."""
        # The description is made when somebody reads it: it costs a fifth of the decision.
        route = self._settings.policy.route
        lookup = waiting.known.how.value
        describe = partial(
            describe_decision, ask.view, ask.query, decision, route, offload, lookup=lookup
        )
        self._decisions.add(ask.query.request_id, describe)
        if isinstance(decision.route, RoutePlan):
            self._fleet.note_route(ask.query.request_id, decision.route, now)
            if ask.matches:
                self._reads.note(decision.route, _block_size(ask.view, decision.route))


def _block_size(view: FleetView, plan: RoutePlan) -> int:
    chosen = plan.prefill[0].worker_id
    return next(w for w in view.workers if w.info.worker_id == chosen).info.layout.block_size


def _describe(span: Span, query: RouteQuery, outcome: RoutePlan | Refusal) -> None:
    if isinstance(outcome, Refusal):
        metrics.ROUTES.labels(outcome.reason.value, query.placement.value).inc()
        span.set(outcome=outcome.reason.value, reason=outcome.message)
        log.info(
            "route_refused",
            request_id=query.request_id,
            trace_id=span.trace_id,
            reason=outcome.reason.value,
            message=outcome.message,
        )
        return
    for counter in metrics.planned(outcome.placement.value, outcome.policy, outcome.cause.value):
        counter.inc()
    span.set(
        outcome="plan",
        placement=outcome.placement.value,
        policy=outcome.policy,
        cache_known=outcome.cache_known,
        cause=outcome.cause.value,
        reason=outcome.reason,
    )
    log.debug(
        "routed",
        request_id=query.request_id,
        trace_id=span.trace_id,
        placement=outcome.placement.value,
        reason=outcome.reason,
    )
