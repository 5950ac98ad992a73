"""Makes route queries wait for each other and decides on them together, on the event loop.

`policy/gathering.py` chooses the queries and the time. This module wakes up at that time and
delivers the answers. Tests: tests/unit/scheduler/test_gathering.py.
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
    """A query that waits for its decision.

    Attributes:
        known: the workers that hold leading blocks.
        since: when that was known, in seconds on the performance counter.
    """

    query: RouteQuery
    known: Known
    since: float = 0.0


@dataclass(eq=False, frozen=True, slots=True)
class _Open:
    waiting: Waiting
    answer: asyncio.Future[Outcome]


Decide = Callable[[Sequence[Waiting]], Sequence[tuple[Waiting, Outcome]]]
"""Decides on all queries. Returns them in the order in which to answer them."""


class JointDecisions:
    """Queries of one group that wait for each other.

    Args:
        hold_s: returns how long a query should wait for others that are not known yet.
        decide: makes the decisions.
    """

    def __init__(self, hold_s: Callable[[Waiting], float], decide: Decide) -> None:
        self._gathering: Gathering[_Open] = Gathering(lambda each: hold_s(each.waiting))
        self._decide = decide
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at: float | None = None

    @property
    def num_waiting(self) -> int:
        """Number of queries that wait for their decision or for its inputs."""
        return self._gathering.num_waiting

    async def decided(self, lookup: Awaitable[Waiting]) -> Outcome:
        """Waits for the decision on a query, which is made together with others.

        Args:
            lookup: gets the decision's inputs. Queries whose inputs are complete wait for this one.
        """
        loop = asyncio.get_running_loop()
        seat = self._gathering.arrive()
        try:
            waiting = await lookup
            # The index answers at once. This lets all queries of this event-loop iteration arrive
            # first.
            await asyncio.sleep(0)
            opened = _Open(waiting, loop.create_future())
            self._gathering.ready(seat, opened, loop.time())
            self._go_on(loop.time())
            return await opened.answer
        finally:
            self._gathering.leave(seat)
            self._go_on(loop.time())

    def _go_on(self, now: float) -> None:
        """Decides on the queries that are due, and sets the timer for the others."""
        taken = self._gathering.take(now)
        closes_at = self._gathering.closes_at
        if self._wakes_at != closes_at:  # a uvloop timer cannot always report its time
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
        # The event loop may call early, by up to its clock's resolution.
        self._go_on(max(asyncio.get_running_loop().time(), closes_at))

    def _answer(self, taken: Sequence[_Open]) -> None:
        # A query whose caller hung up in this iteration must not count as load of a worker.
        opened = [each for each in taken if not each.answer.done()]
        if not opened:
            return
        answers = {id(each.waiting): each.answer for each in opened}
        try:
            for waiting, outcome in self._decide([each.waiting for each in opened]):
                answers[id(waiting)].set_result(outcome)
        finally:
            # If `decide` failed, all waiting queries get an error instead of waiting forever.
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(RuntimeError("a decision on several requests failed"))
                    answer.exception()  # its caller is gone: marks the error as retrieved
