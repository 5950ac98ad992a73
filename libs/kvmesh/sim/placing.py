"""A gateway's search for workers, in virtual time: that of `services/gateway/request/search.py`.

Tests: tests/unit/sim/test_simulation.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from kvmesh.core.types import (
    Candidate,
    Placement,
    PrefixSource,
    Refusal,
    RefusalReason,
    RoutePlan,
    WorkerId,
)
from kvmesh.policy.connections import BY_CONNECTIONS, Connections
from kvmesh.policy.forwarding import (
    REROUTE_AFTER_S,
    backoff_s,
    rounds_per_route,
    still_refusing,
)
from kvmesh.policy.waiting import Looking, looking
from kvmesh.sim.events import EventQueue, Timer
from kvmesh.sim.fleet import SimFleet
from kvmesh.sim.requests import SimRequest, SimSequence
from kvmesh.sim.systems import Deadlines
from kvmesh.sim.turns import Lanes
from kvmesh.sim.worker import SimWorker


@dataclass(eq=False, slots=True)
class Placed:
    """A request that has its workers.

    Attributes:
        decode: the reserved sequence on the decode worker.
        prefill: the sequence that computes the prompt; the same as `decode` when aggregated.
    """

    request: SimRequest
    decode_worker: SimWorker
    decode: SimSequence
    prefill_worker: SimWorker
    prefill: SimSequence


def _not_noted(_request: SimRequest, _plan: RoutePlan) -> None:
    """Of searches without control loops."""


def _no_fetch(worker: SimWorker, sequence: SimSequence, _source: PrefixSource) -> None:
    worker.go_on(sequence, 0)


Answer = Callable[[RoutePlan | Refusal], None]
"""Callback for the scheduler's decision."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Shared state and callbacks of all searches of a gateway.

    Attributes:
        route: asks the scheduler, which answers at once or later; its second argument is the
            workers to avoid.
        placed, refused: called at the end of a search.
        fetch: fetches a prefix to a worker before it computes.
        searching: requests that look for workers now.
        connections: the gateway's connections; some policies offer in their order, not the plan's.
        by_connections: whether all do.
        lanes: turns of the gateway's waiting requests.
        deadlines: when searches end.
        planned: called with the first plan of a request that no worker had before.
    """

    events: EventQueue
    rng: random.Random
    fleet: SimFleet
    route: Callable[[SimRequest, frozenset[WorkerId], Answer], None]
    placed: Callable[[Placed], None]
    refused: Callable[[SimRequest, RefusalReason], None]
    searching: dict[SimRequest, Placing]
    connections: Connections
    fetch: Callable[[SimWorker, SimSequence, PrefixSource], None] = _no_fetch
    lanes: Lanes = field(default_factory=Lanes)
    deadlines: Deadlines = Deadlines.ADMISSION
    by_connections: bool = False
    planned: Callable[[SimRequest, RoutePlan], None] = _not_noted


class Placing:
    """One search for workers, from `start` to a placement or a refusal.

    Messages to workers take time, so a freed slot stays empty until the next search asks for it.

    Attributes:
        remote: whether its latest plan names workers of the remote cluster; None before a plan.
    """

    def __init__(self, desk: Desk, request: SimRequest, avoid: frozenset[WorkerId]) -> None:
        self._desk = desk
        self._request = request
        self._turns = desk.lanes.of(request)
        self._failed = avoid
        self._refused: dict[WorkerId, float] = {}
        self._asked: set[WorkerId] = set()  # workers that refused in the last round
        self._reserved: tuple[SimWorker, SimSequence] | None = None
        self._plan: RoutePlan | None = None
        self.remote: bool | None = None
        self._is_noted = request.attempt > 0
        self._plan_rounds = 0
        self._plan_old_at = 0.0
        self._num_rounds = 0
        self._last = RefusalReason.DEADLINE
        self._tried_at_opening = -1
        self._num_refused = 0
        self._deadline: Timer | None = None
        self._until = math.inf
        self._until_of = -1  # number of prefill times that `_until` is made of

    @property
    def has_reservation(self) -> bool:
        """Whether the request waits for a prefill worker; else it waits for a decode worker."""
        return self._reserved is not None

    @property
    def was_refused(self) -> bool:
        """Whether no worker took the request in an earlier round."""
        return self._num_rounds > 0

    @property
    def is_queued(self) -> bool:
        """Whether the request waits for its first turn to ask."""
        return self._deadline is not None and not self.was_refused

    def start(self) -> None:
        """Starts the search."""
        self._desk.searching[self._request] = self
        self._turns.enter(self._request)
        # The time until the first offer arrives was counted before.
        if self._is_my_turn():
            self._round()

    def _is_my_turn(self) -> bool:
        if self._turns.wait(self._request, self._called):
            return True
        self._deadline = self._desk.events.at(self._until_s, self._late)
        return False

    @property
    def _until_s(self) -> float:
        """Time at which the search ends, by the present estimate."""
        request = self._request
        # A client that is already reading waits until its deadline.
        if self._desk.deadlines is Deadlines.TIMEOUT or request.generated:
            return request.deadline_s
        times = self._turns.prefill_times
        if times.num_noted != self._until_of:  # a request that waits asks several times a round
            ttft_s = request.deadline_s - request.arrival_s
            self._until = request.arrival_s + times.patience_s(request.num_tokens, ttft_s)
            self._until_of = times.num_noted
        now = self._desk.events.now()
        return self._until if self._until > now else now

    def _called(self) -> None:
        assert self._deadline is not None, "who waits for its turn has a deadline"
        self._deadline.cancel()
        self._deadline = None
        self._ask_again(self._desk.events.now(), self._until_s)

    def _late(self) -> None:
        self._end(self._last)

    def _go_on(self) -> None:
        """Continues after a pause."""
        now, until = self._desk.events.now(), self._until_s
        if now >= until:
            self._end(self._last)
        elif self._is_my_turn():
            self._ask_again(now, until)

    def _ask_again(self, now: float, until: float) -> None:
        # A new plan adds the round trip to the scheduler.
        messages = 3 if self._needs_plan(now) else 1
        arrives = now + messages * self._desk.fleet.message_s
        self._desk.events.at(min(arrives, until), self._round)

    def _round(self) -> None:
        now = self._desk.events.now()
        if now >= self._until_s:
            self._end(self._last)
            return
        self._num_refused = 0
        if self._needs_plan(now):
            avoid = self._failed.union(self._refused)
            self._desk.route(self._request, avoid, self._planned)
        elif self._desk.fleet.openings == self._tried_at_opening:
            # Until a worker has more room than when it was asked, the answers are the same.
            self._refused.update(dict.fromkeys(self._asked, now))
            self._spend(self._asked)
            self._plan_rounds += 1
            self._pause()
        else:
            self._ask_workers()

    def _planned(self, outcome: RoutePlan | Refusal) -> None:
        now = self._desk.events.now()
        self._refused = still_refusing(self._refused, now)
        self._plan_rounds = 0
        self._plan_old_at = now + REROUTE_AFTER_S
        self._plan = outcome if isinstance(outcome, RoutePlan) else None
        if self._plan is not None and not self._is_noted:
            self._is_noted = True
            self._desk.planned(self._request, self._plan)
        if isinstance(outcome, Refusal):
            self._last = outcome.reason
            if outcome.reason in (RefusalReason.TOO_LONG, RefusalReason.DEADLINE):
                self._end(outcome.reason)
                return
        if self._plan is not None:
            self.remote = self._plan.remote
            may_ask = self._turns.waits_for(self._request, remote=self.remote)
            if not may_ask and not self._is_my_turn():
                self._tried_at_opening = -1
                return
        self._ask_workers()

    def _ask_workers(self) -> None:
        self._asked.clear()  # one that refused in an earlier round may have accepted since
        if self._plan is not None and self._try(self._plan):
            return
        self._plan_rounds += 1
        self._tried_at_opening = self._desk.fleet.openings
        self._pause()

    def _needs_plan(self, now: float) -> bool:
        if self._plan is None or now >= self._plan_old_at:
            return True
        return self._plan_rounds >= rounds_per_route(self._plan.cause)

    def _pause(self) -> None:
        desk = self._desk
        self._turns.missed(self._request, remote=self.remote)
        pace = self._turns.pace(self._request)
        longest = backoff_s(self._num_rounds, self._turns.crowd.num_waiting) * pace
        self._num_rounds += 1
        # Workers are asked one after the other; the message to the first was counted before.
        answers = max(2 * self._num_refused - 1, 0) * desk.fleet.message_s
        wait = answers + longest * desk.rng.uniform(0.5, 1.0)
        desk.events.at(min(desk.events.now() + wait, self._until_s), self._go_on)

    def _try(self, plan: RoutePlan) -> bool:
        if plan.placement is Placement.AGGREGATED:
            return any(self._try_aggregated(each) for each in plan.prefill)
        decode = [each.worker_id for each in plan.decode]
        candidates = {each.worker_id: each for each in plan.prefill}
        names = list(candidates)
        if self._desk.by_connections or plan.policy in BY_CONNECTIONS:
            names = self._desk.connections.order(names)
        for name in names:
            if not self._reserve_one_of(decode):
                return False
            if self._offer(candidates[name]):
                return True
        return False

    def _reserve_one_of(self, names: list[WorkerId]) -> bool:
        if self._reserved is not None:
            worker, _ = self._reserved
            if worker.alive and worker.info.worker_id in names:
                return True
            self._drop()
        return any(self._reserve(name) for name in names)

    def _try_aggregated(self, candidate: Candidate) -> bool:
        if self._reserved is not None:
            self._drop()
        if not self._reserve(candidate.worker_id):
            return False
        if self._offer(candidate):
            return True
        if self._reserved is not None:
            self._drop()
        return False

    def _reserve(self, name: WorkerId) -> bool:
        worker = self._desk.fleet.workers[name]
        outcome = worker.reserve(self._request)
        if isinstance(outcome, Refusal):
            self._note(name, outcome)
            return False
        self._reserved = (worker, outcome)
        return True

    def _offer(self, candidate: Candidate) -> bool:
        assert self._reserved is not None, "a prompt is offered with a reservation"
        self._request.num_offers += 1
        decode_worker, decode = self._reserved
        name, source = candidate.worker_id, candidate.source
        worker = self._desk.fleet.workers[name]
        outcome = worker.offer(self._request, decode, held=source is not None)
        if isinstance(outcome, Refusal):
            self._note(name, outcome)
            self._desk.connections.rejected(name)
            if outcome.reason is RefusalReason.LOST:
                self._drop()  # a worker that does not answer may be writing into the blocks
            return False
        self._desk.connections.accepted(name)
        self._desk.searching.pop(self._request, None)
        self._turns.leave(self._request, self._desk.events.now(), placed=True)
        self._desk.placed(Placed(self._request, decode_worker, decode, worker, outcome))
        if source is not None:
            self._desk.fetch(worker, outcome, source)
        return True

    def _note(self, name: WorkerId, refusal: Refusal) -> None:
        self._last = refusal.reason
        self._refused[name] = self._desk.events.now()
        self._asked.add(name)
        self._spend((name,))

    def _spend(self, names: Collection[WorkerId]) -> None:
        """Counts refused offers: they take time, and core time on a shared host."""
        self._num_refused += len(names)
        host = self._desk.fleet.host
        if host is not None:
            host.note_refusals(len(names))
            for name in names:
                self._desk.fleet.workers[name].note_refusal()

    def _drop(self) -> None:
        assert self._reserved is not None, "nothing to drop"
        worker, sequence = self._reserved
        if worker.alive:
            worker.release(sequence)
        self._reserved = None

    def _end(self, reason: RefusalReason) -> None:
        if self._reserved is not None:
            self._drop()
        self._desk.searching.pop(self._request, None)
        self._turns.leave(self._request, self._desk.events.now(), placed=False)
        self._desk.refused(self._request, reason)


def waiting_by_scenario(searching: Mapping[SimRequest, Placing]) -> dict[str, Looking]:
    """Returns the waiting requests of each scenario, as a gateway tells them to its scheduler."""
    asked, reserved, queued = Counter[str](), Counter[str](), Counter[str]()
    planned, remote = Counter[str](), Counter[str]()
    for request, each in searching.items():
        scenario = request.trace.scenario
        asked[scenario] += each.was_refused
        reserved[scenario] += each.was_refused and each.has_reservation
        queued[scenario] += each.is_queued
        if each.remote is not None and (each.was_refused or each.is_queued):
            planned[scenario] += 1
            remote[scenario] += each.remote
    return {
        scenario: looking(
            count, reserved[scenario], queued[scenario], planned[scenario], remote[scenario]
        )
        for scenario, count in asked.items()
        if count or queued[scenario]
    }
