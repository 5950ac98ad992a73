"""Decides which of this gateway's requests may ask the workers of one group now.

While every request finds workers, all requests may ask at once. A request that finds none joins
the fair queue, and so do all later requests until the queue is empty again. Those whose plan names
workers of the remote cluster do not wait for those whose plan names local ones, nor the other way.
Tests: tests/unit/gateway/request/test_turnstile.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from kvmesh.policy.fair_share import Claim, FairQueue


class Turn:
    """One request's place at the turnstile.

    Args:
        claim: its claim in the fair queue; None for a request that never queues.

    Attributes:
        allowed: set while a queued request may ask.
        is_queued: the request is in the fair queue.
        remote: whether it waits for the remote cluster's prefill workers; None: not known yet.
    """

    def __init__(self, turnstile: Turnstile, claim: Claim | None) -> None:
        self._turnstile = turnstile
        self.claim = claim
        self.allowed = asyncio.Event()
        self.is_queued = False
        self.remote: bool | None = None

    async def wait(self, timeout_s: float) -> None:
        """Returns when it is this request's turn, or at the timeout."""
        if not self.is_queued or self.allowed.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.allowed.wait()
        except TimeoutError:
            return  # the caller checks its deadline

    def waits_for(self, *, remote: bool) -> bool:
        """Notes whose prefill workers the request waits for.

        Returns whether it is still its turn: not if others were first to wait for these.
        """
        self.remote = remote
        return self._turnstile.waits_for(self, remote=remote)

    def missed(self) -> None:
        """Notes that no worker took the request in this round."""
        self._turnstile.missed(self)


class Turnstile:
    """The turns of one group's requests."""

    def __init__(self) -> None:
        self._queue = FairQueue()
        self._found: Sequence[Hashable] = ()  # the queue's answer that `_heads` is made of
        self._heads: list[Turn] = []

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def pace(self, turn: Turn) -> float:
        """Returns the factor on the pause of a request between two rounds."""
        return self._queue.pace(turn) if turn.is_queued else 1.0

    @contextmanager
    def enter(self, claim: Claim | None) -> Iterator[Turn]:
        """Holds a place. If the block ends without an error, the request found workers.

        Args:
            claim: see `Turn`.
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
        """Notes that no worker took this turn's request in this round."""
        if turn.is_queued:
            self._queue.missed(turn)
            self._refresh()
        else:
            self._join(turn)

    def waits_for(self, turn: Turn, *, remote: bool) -> bool:
        """Lets a turn wait beside those for the same cluster; returns whether it may still ask."""
        if remote:
            self._queue.split()
        if not turn.is_queued or not self._queue.waits_for(turn, remote=remote):
            return True
        self._refresh()
        return turn.allowed.is_set()

    def _join(self, turn: Turn) -> None:
        if turn.claim is not None:
            turn.is_queued = True
            self._queue.add(turn, turn.claim)
            if turn.remote is not None:
                self._queue.waits_for(turn, remote=turn.remote)
            self._refresh()

    def _refresh(self) -> None:
        found = self._queue.heads()
        if found is self._found:
            return
        self._found = found
        heads = [turn for turn in found if isinstance(turn, Turn)]
        for turn in self._heads:
            turn.allowed.clear()
        for turn in heads:
            turn.allowed.set()
        self._heads = heads
