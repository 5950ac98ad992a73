"""Whose turn it is to look for the workers of one group, for the requests of this gateway.

As long as nobody looks in vain everybody looks at once. A request that found no worker joins the
fair queue, and so do all that come after it, until the queue is empty again.
Tests: tests/unit/gateway/request/test_turnstile.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from kvmesh.policy.fair_share import Claim, FairQueue


class Turn:
    """The place of one request.

    Args:
        claim: None for a request that waits for nobody.
    """

    def __init__(self, turnstile: Turnstile, claim: Claim | None) -> None:
        self._turnstile = turnstile
        self.claim = claim
        self.allowed = asyncio.Event()
        self.is_queued = False

    async def wait(self, timeout_s: float) -> None:
        """Returns when it is this request's turn, or at the timeout."""
        if not self.is_queued or self.allowed.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.allowed.wait()
        except TimeoutError:
            return  # the caller looks at its deadline

    def missed(self) -> None:
        """It looked for workers in vain."""
        self._turnstile.missed(self)


class Turnstile:
    """The requests of a gateway that wait for the workers of one group."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._heads: list[Turn] = []

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def share(self) -> float:
        """Which part of the waiting requests looks for workers now, more than 0 to 1."""
        return len(self._heads) / len(self._queue) if self._heads else 1.0

    @contextmanager
    def enter(self, claim: Claim | None) -> Iterator[Turn]:
        """Holds a place; leaving without an error means that workers were found.

        Args:
            claim: None for a request that waits for nobody.
        """
        turn = Turn(self, claim)
        if self.num_waiting:
            self._join(turn)
        was_placed = False
        try:
            yield turn
            was_placed = True
        finally:
            if turn.is_queued:
                (self._queue.placed if was_placed else self._queue.left)(turn)
                self._refresh()

    def missed(self, turn: Turn) -> None:
        """See `Turn.missed`."""
        if turn.is_queued:
            self._queue.missed()
            self._refresh()
        else:
            self._join(turn)

    def _join(self, turn: Turn) -> None:
        if turn.claim is not None:
            turn.is_queued = True
            self._queue.add(turn, turn.claim)
            self._refresh()

    def _refresh(self) -> None:
        heads = [turn for turn in self._queue.heads() if isinstance(turn, Turn)]
        for turn in self._heads:
            turn.allowed.clear()
        for turn in heads:
            turn.allowed.set()
        self._heads = heads
