"""Joint decisions in virtual time. As in the scheduler, `policy/gathering.py` says which requests
are decided together, and when. Lookups take no time, so requests of one moment are always together.

Tests: tests/unit/sim/test_joint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvmesh.core.types import RouteQuery, WorkerId
from kvmesh.policy.gathering import Gathering, Seat
from kvmesh.sim.events import EventQueue, Timer
from kvmesh.sim.placing import Answer
from kvmesh.sim.requests import SimRequest


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its route.

    Attributes:
        matches: number of the query's leading blocks that each worker holds.
    """

    request: SimRequest
    query: RouteQuery
    matches: Mapping[WorkerId, int]
    answer: Answer


class JointDecisions:
    """Requests that wait for each other's decision.

    Args:
        hold_s: returns the seconds that a request should wait for others.
        decide: decides about several requests and answers them.
    """

    def __init__(
        self,
        events: EventQueue,
        hold_s: Callable[[Waiting], float],
        decide: Callable[[Sequence[Waiting]], None],
    ) -> None:
        self._events = events
        self._decide = decide
        self._gathering: Gathering[Waiting] = Gathering(hold_s)
        self._timer = Timer(self._go_on)

    def take(self, waiting: Waiting) -> None:
        """Adds a request; `decide` gets it now or later."""
        seat = self._gathering.arrive()
        self._events.after(0.0, partial(self._looked_up, seat, waiting))

    def _looked_up(self, seat: Seat, waiting: Waiting) -> None:
        self._gathering.ready(seat, waiting, self._events.now())
        self._go_on()

    def _go_on(self) -> None:
        taken = self._gathering.take(self._events.now())
        self._timer.cancel()
        closes_at = self._gathering.closes_at
        if closes_at is not None:
            self._timer = self._events.at(closes_at, self._go_on)
        if taken:
            self._decide(taken)
