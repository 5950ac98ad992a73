"""Route queries that are decided together, on the event loop: `policy/gathering.py` says which and
when, this wakes up at that time and gives each its answer.

Tests: tests/unit/scheduler/test_gathering.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvmesh.core.types import Refusal, RoutePlan, RouteQuery
from kvmesh.policy.gathering import Gathering
from services.scheduler.knowledge import Known

Outcome = RoutePlan | Refusal


@dataclass(frozen=True, slots=True)
class Waiting:
    """A query that is to be decided.

    Attributes:
        known: who holds leading blocks.
        since: seconds on the performance counter when that was known.
    """

    query: RouteQuery
    known: Known
    since: float = 0.0


@dataclass(eq=False, frozen=True, slots=True)
class _Open:
    waiting: Waiting
    answer: asyncio.Future[Outcome]


Decide = Callable[[Sequence[Waiting]], Sequence[tuple[Waiting, Outcome]]]
"""Decides on all; returns them in the order in which they are to be told."""


class JointDecisions:
    """Queries of one group that wait for each other.

    Args:
        hold_s: how long one should wait although nobody else is on the way.
        decide: makes the decisions.
    """

    def __init__(self, hold_s: Callable[[Waiting], float], decide: Decide) -> None:
        self._gathering: Gathering[_Open] = Gathering(lambda each: hold_s(each.waiting))
        self._decide = decide
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None

    @property
    def num_waiting(self) -> int:
        """Queries that wait for their decision, or for what it reads."""
        return self._gathering.num_waiting

    async def decided(self, lookup: Awaitable[Waiting]) -> Outcome:
        """The decision on a query, and on those that came with it.

        Args:
            lookup: what it reads; those that have theirs meanwhile wait for it.
        """
        loop = asyncio.get_running_loop()
        seat = self._gathering.arrive()
        try:
            waiting = await lookup
            # An index answers at once: all queries of this turn of the loop arrive before one is
            # ready.
            await asyncio.sleep(0)
            opened = _Open(waiting, loop.create_future())
            self._gathering.ready(seat, opened, loop.time())
            self._go_on(loop.time())
            return await opened.answer
        finally:
            self._gathering.leave(seat)
            self._go_on(loop.time())

    def _go_on(self, now: float) -> None:
        """Decides on those whose time has come, and wakes up when that of the others has."""
        taken = self._gathering.take(now)
        closes_at = self._gathering.closes_at
        if self._wakes_at != closes_at:  # a timer of uvloop cannot always say it
            self._wakes_at = closes_at
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if closes_at is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_at(closes_at, self._wake, closes_at)
        if taken:
            self._answer(taken)

    def _wake(self, closes_at: float) -> None:
        self._timer = self._wakes_at = None
        # A loop calls up to its clock's resolution early.
        self._go_on(max(asyncio.get_running_loop().time(), closes_at))

    def _answer(self, taken: Sequence[_Open]) -> None:
        # Whoever has hung up in this very turn of the loop is no load of any worker.
        opened = [each for each in taken if not each.answer.done()]
        if not opened:
            return
        answers = {id(each.waiting): each.answer for each in opened}
        try:
            for waiting, outcome in self._decide([each.waiting for each in opened]):
                answers[id(waiting)].set_result(outcome)
        finally:
            # Nobody waits for an answer that a bug has eaten: each learns of it, as by itself.
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(RuntimeError("a decision on several requests failed"))
                    answer.exception()  # who closed raises what it was, and does not wait
