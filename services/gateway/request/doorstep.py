"""Requests that were read wait here until they may begin: a few in each turn of the event loop.

To begin costs much more than to read. If all that were read began at once, the next ones would lie
unread for as long as that takes, and nobody would know for how long they have waited, and that
they should be refused. Tests: tests/unit/gateway/request/test_doorstep.py.
"""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 8
"""Requests that begin in one turn of the loop; some milliseconds of work."""


class Doorstep:
    """The requests of one gateway, in the order in which they were read.

    Attributes:
        age_s: how long the request that began last had waited since it came.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_begun = 0
        self._is_turning = False
        self.age_s = 0.0

    def is_hopeless(self, patience_s: float) -> bool:
        """Whether one more request would have to wait here for longer than its patience."""
        return bool(self._waiting) and self.age_s > patience_s

    async def enter(self, arrived_at: float) -> float:
        """Waits for its turn.

        Args:
            arrived_at: when it came, on the loop's clock.

        Returns:
            How long ago that is.
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
        """What was read meanwhile stands in line; the first ones may begin."""
        self._num_begun = 0
        while self._waiting and self._num_begun < PER_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have gone
                turn.set_result(None)
                self._num_begun += 1
        self._is_turning = self._num_begun > 0
        if self._is_turning:
            self._loop.call_soon(self._turn)
