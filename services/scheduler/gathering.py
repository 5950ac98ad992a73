"""Route queries that wait for each other, so that they are decided together.

The first one waits for the prefixes that are being looked up for others when it comes, or, where
its prompt would wait anyway, for the window; whoever comes meanwhile is decided with it. So one
that comes alone while a worker is idle waits for nothing, and no stream of lookups keeps it. The
simulator has the same in virtual time (`kvmesh/sim/gathering.py`).
Tests: tests/unit/scheduler/test_gathering.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.core.types import PrefixMatch, Refusal, RoutePlan, RouteQuery
from kvmesh.policy.joint import MAX_JOINT

Outcome = RoutePlan | Refusal


@dataclass(frozen=True, slots=True)
class Waiting:
    """A query that is to be decided.

    Attributes:
        known: who holds leading blocks; None when nobody knows.
    """

    query: RouteQuery
    known: list[PrefixMatch] | None


@dataclass(frozen=True, slots=True)
class _Seat:
    waiting: Waiting
    answer: asyncio.Future[Outcome]


Decide = Callable[[Sequence[Waiting]], Sequence[tuple[Waiting, Outcome]]]
"""Decides on all; returns them in the order in which they are to be told."""


class Gathering:
    """Queries of one model that wait now.

    Args:
        window_s: longest time that one waits for others.
        hold_s: how long one should wait although nobody else is on the way.
        decide: makes the decisions.
    """

    def __init__(self, window_s: float, hold_s: Callable[[Waiting], float], decide: Decide) -> None:
        self._window_s = window_s
        self._hold_s = hold_s
        self._decide = decide
        self._seats: list[_Seat] = []
        self._looking: set[object] = set()
        self._awaited: set[object] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Queries that wait for their decision, or for what it reads."""
        return len(self._seats) + len(self._looking)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """While a query's prefixes are looked up, those that get theirs meanwhile wait for it."""
        lookup = object()
        self._looking.add(lookup)
        try:
            yield
        finally:
            self._looking.discard(lookup)
            self._awaited.discard(lookup)

    async def decided(self, waiting: Waiting) -> Outcome:
        """The decision on a query, and on those that came with it."""
        loop = asyncio.get_running_loop()
        seat = _Seat(waiting, loop.create_future())
        if not self._seats:
            # Lookups that begin later are not waited for: under load there is always another one.
            self._awaited = self._looking.copy()
        self._seats.append(seat)
        hold_s = self._window_s if self._awaited else self._hold_s(waiting)
        if hold_s <= 0 or len(self._seats) >= MAX_JOINT:
            self._close()
        elif self._timer is None or loop.time() + hold_s < self._timer.when():
            self._end_timer()
            self._timer = loop.call_later(hold_s, self._close)
        return await seat.answer

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._end_timer()
        seats, self._seats = self._seats, []
        # Who has hung up meanwhile is no load of any worker.
        seats = [seat for seat in seats if not seat.answer.done()]
        if not seats:
            return
        answers = {id(seat.waiting): seat.answer for seat in seats}
        try:
            for waiting, outcome in self._decide([seat.waiting for seat in seats]):
                answers[id(waiting)].set_result(outcome)
        finally:
            # Nobody waits for an answer that a bug has eaten: each learns of it, as by itself.
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(RuntimeError("a decision on several requests failed"))
                    answer.exception()  # who closed raises what it was, and does not wait
