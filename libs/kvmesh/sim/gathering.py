"""Requests that wait for each other's route, as in the scheduler's `gathering.py`, in virtual time.

Tests: tests/unit/sim/test_gathering.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import RouteQuery, WorkerId
from kvmesh.policy.joint import MAX_JOINT
from kvmesh.sim.events import EventQueue, Timer
from kvmesh.sim.placing import Answer
from kvmesh.sim.requests import SimRequest


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its route.

    Attributes:
        matches: leading blocks of the query that each worker holds.
    """

    request: SimRequest
    query: RouteQuery
    matches: Mapping[WorkerId, int]
    answer: Answer


class Gathering:
    """Those that wait now.

    Args:
        hold_s: how long one should wait for others.
        decide: decides on several and answers them.
    """

    def __init__(
        self,
        events: EventQueue,
        hold_s: Callable[[Waiting], float],
        decide: Callable[[Sequence[Waiting]], None],
    ) -> None:
        self._events = events
        self._hold_s = hold_s
        self._decide = decide
        self._waiting: list[Waiting] = []
        self._timer: Timer | None = None
        self._ends = 0.0

    def take(self, waiting: Waiting) -> None:
        """Takes a request in; those of one moment are always decided together."""
        self._waiting.append(waiting)
        if len(self._waiting) == MAX_JOINT:
            self._close()
            return
        ends = self._events.now() + self._hold_s(waiting)
        if self._timer is None or ends < self._ends:
            if self._timer is not None:
                self._timer.cancel()
            self._ends = ends
            self._timer = self._events.at(ends, self._close)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        self._decide(waiting)
