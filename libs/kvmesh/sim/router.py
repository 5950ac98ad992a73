"""The scheduler of a simulation: makes the service's decisions (`services/scheduler/router.py`) on
the simulated fleet, for one request or for several together.

Tests: tests/unit/sim/test_simulation.py, tests/unit/sim/test_joint.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvmesh.core.types import BlockHash, Refusal, RefusalReason, RoutePlan, RouteQuery, WorkerId
from kvmesh.policy.composition import decide_route
from kvmesh.policy.joint import Ask, decide_jointly, hold_s, in_turn
from kvmesh.policy.late import first_token_s
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.policy.ranking import ROUND_ROBIN
from kvmesh.policy.recent_reads import RecentReads
from kvmesh.policy.view import FleetView
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fetch import fleet_pace
from kvmesh.sim.fleet import MODEL, SimFleet
from kvmesh.sim.joint import JointDecisions, Waiting
from kvmesh.sim.placing import Answer
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.scenario import Scenario, accepted_tpot_s
from kvmesh.sim.trace_request import TRACE_BLOCK

Decide = Callable[[], RoutePlan | Refusal]
"""Function that makes one decision."""


class SimRouter:
    """Answers which workers run a request.

    Args:
        offload: returns the inputs of the choice of cluster.
        reasons: counter of the decisions' reasons.
        around: wraps the decisions about single requests, for example to time them; None: no
            wrapper.
        note_read: called with the blocks of a prompt that some worker holds; None: nobody counts.
    """

    def __init__(
        self,
        scenario: Scenario,
        events: EventQueue,
        fleet: SimFleet,
        offload: Callable[[], OffloadState],
        reasons: Counter[str],
        around: Callable[[Decide], RoutePlan | Refusal] | None,
        note_read: Callable[[Sequence[BlockHash]], None] | None = None,
    ) -> None:
        self._system = scenario.system
        self._events = events
        self._fleet = fleet
        self._read_offload = offload
        self._reasons = reasons
        self._around = around
        self._note_read = note_read
        self._profile = scenario.profile
        self._pace = fleet_pace(scenario.profile, fleet)
        self._tpot_s = accepted_tpot_s(scenario)
        self._reads = RecentReads()
        self._rotates = scenario.system.route.name == ROUND_ROBIN.name
        self._decided: dict[tuple[SimRequest, frozenset[WorkerId]], OffloadPlan] = {}
        self._decided_in: tuple[int, OffloadState] | None = None
        self._joint = JointDecisions(events, self._hold_s, self._route_together)

    def measure_links(self) -> None:
        """Takes over the speeds that the links have now."""
        self._pace = fleet_pace(self._profile, self._fleet)
        self._decided_in = None

    def ask(self, request: SimRequest, avoid: frozenset[WorkerId], answer: Answer) -> None:
        """Answers at once, or after a joint decision about several requests.

        Args:
            avoid: workers that failed or refused the request.
        """
        self._fleet.withdraw(request.request_id)  # it asks again, so its last plan failed
        if self._system.joint is None:
            decide = partial(self._route, request, avoid)
            answer(decide() if self._around is None else self._around(decide))
        else:
            matches = self._match(request)
            self._joint.take(Waiting(request, self._query(request, avoid), matches, answer))

    def _route(self, request: SimRequest, avoid: frozenset[WorkerId]) -> RoutePlan | Refusal:
        query = self._query(request, avoid)
        plan = self._decide(request, query)
        if self._system.rejects_early and isinstance(plan.route, RoutePlan):
            late_s = self._first_token_s(query, plan.route) - request.deadline_s
            if late_s > 0.0:
                return Refusal(RefusalReason.DEADLINE, f"{late_s:.1f} s too late")
        return self._routed(request, plan)

    def _decide(self, request: SimRequest, query: RouteQuery) -> OffloadPlan:
        """Decides, or returns the request's last decision if nothing has changed since.

        In a crowd, most requests ask again while all workers are as full as before.
        """
        offload = self._offload
        state = self._fleet.num_changes, offload
        if state != self._decided_in or self._rotates:
            self._decided_in = state
            self._decided.clear()
        plan = self._decided.get((request, query.avoid))
        if plan is None:
            matches, now = self._match(request), self._events.now()
            view = self._view_for(query, matches)
            plan = decide_route(self._system, view, query, matches, now, offload)
            self._decided[request, query.avoid] = plan
        return plan

    def _match(self, request: SimRequest) -> Mapping[WorkerId, int]:
        matches = self._fleet.index.match(request.reusable_hashes)
        if self._note_read is not None and matches:
            self._note_read(request.reusable_hashes[: max(matches.values())])
        return matches

    def _first_token_s(self, query: RouteQuery, plan: RoutePlan) -> float:
        """Returns the predicted time of the first token on a plan's first prefill worker."""
        views = self._fleet.view().workers
        worker = next(each for each in views if each.worker_id == plan.prefill[0].worker_id)
        return self._events.now() + first_token_s(plan, worker, query, self._pace.token_s)

    def _route_together(self, gathered: Sequence[Waiting]) -> None:
        # Sorted by id, as in the scheduler: the order of arrival does not matter.
        waiting = sorted(gathered, key=lambda each: each.query.request_id)
        asks = [self._ask_of(each) for each in waiting]
        plans = decide_jointly(self._system, asks, self._events.now(), self._offload)
        for each, plan in zip(waiting, plans, strict=True):
            self._routed(each.request, plan)
        for each, plan in in_turn(waiting, plans):
            each.answer(plan.route)

    def _hold_s(self, waiting: Waiting) -> float:
        return hold_s(self._system, self._ask_of(waiting), self._events.now(), self._offload)

    def _ask_of(self, waiting: Waiting) -> Ask:
        view = self._view_for(waiting.query, waiting.matches)
        return Ask(waiting.query, view, waiting.matches)

    @property
    def _offload(self) -> OffloadState:
        return self._read_offload()

    def _view_for(self, query: RouteQuery, matches: Mapping[WorkerId, int]) -> FleetView:
        seen = self._fleet.view_for(query, matches)
        # Built directly: `dataclasses.replace` would take a part of a decision's time.
        reads = self._reads.among(seen.workers, matches)
        return FleetView(seen.workers, seen.version, seen.num_routes, self._pace, reads)

    def _routed(self, request: SimRequest, plan: OffloadPlan) -> RoutePlan | Refusal:
        """Counts a decision's reasons, and its plan as load of its workers."""
        if plan.group is not None:
            self._reasons[f"group: {plan.group.reason.value}"] += 1
        if plan.choice is not None:
            request.remote = plan.choice.remote
            self._reasons[f"offload: {plan.choice.reason.value}"] += 1
        if plan.joint is not None:
            self._reasons[f"joint: {plan.joint.reason.value}"] += 1
        if isinstance(plan.route, RoutePlan):
            self._fleet.note_route(request.request_id, plan.route)
            self._reads.note(plan.route, TRACE_BLOCK)
        return plan.route

    def _budget_ms(self, request: SimRequest) -> int:
        """Milliseconds until the first token is late; 0 for a client that is already reading."""
        left_s = request.deadline_s - self._events.now()
        return 0 if request.generated else max(round(1e3 * left_s), 1)

    def _query(self, request: SimRequest, avoid: frozenset[WorkerId]) -> RouteQuery:
        return RouteQuery(
            request.request_id,
            MODEL,
            request.num_tokens,
            request.remaining_tokens,
            request.hashes,
            avoid=avoid,
            scenario=request.trace.scenario,
            ttft_budget_ms=self._budget_ms(request),
            tpot_s=self._tpot_s,
        )
