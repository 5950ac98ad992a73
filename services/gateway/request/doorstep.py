"""Starts a few of the received requests in each event-loop iteration; the others wait in line.

Starting a request costs far more than reading it. If all received requests started at once, the
sockets would stay unread meanwhile, and requests that should be refused early would be refused
late. Tests: tests/unit/gateway/request/test_doorstep.py.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 8
"""Maximum number of requests that start in one event-loop iteration: some milliseconds of work."""


class Doorstep:
    """The line of one gateway's requests, in the order in which they were read.

    Attributes:
        age_s: age of the request that started last, in seconds since it arrived.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_begun = 0
        self._is_turning = False
        self.age_s = 0.0

    def is_hopeless(self, patience_s: float) -> bool:
        """Whether a new request would wait here for longer than `patience_s`."""
        return bool(self._waiting) and self.age_s > patience_s

    async def enter(self, arrived_at: float) -> float:
        """Waits until this request may start.

        Args:
            arrived_at: when the request arrived, in seconds on the loop's clock.

        Returns:
            The request's age in seconds.
        """
        if self._waiting or self._num_begun >= PER_TURN:
            turn = self._loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._num_begun += 1
            if not self._is_turning:
                self._is_turning = True
                self._loop.call_soon(self._turn)
        self.age_s = max(0.0, self._loop.time() - arrived_at)
        return self.age_s

    def _turn(self) -> None:
        """Starts the next requests in line, in a new event-loop iteration."""
        self._num_begun = 0
        while self._waiting and self._num_begun < PER_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # the client may have left
                turn.set_result(None)
                self._num_begun += 1
        self._is_turning = self._num_begun > 0
        if self._is_turning:
            self._loop.call_soon(self._turn)
