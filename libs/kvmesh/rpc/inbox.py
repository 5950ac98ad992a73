"""Queue of one stream's received messages, which are handled one after the other.

Tests: tests/unit/rpc/test_inbox.py, tests/integration/test_rpc_direct.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")

MAX_WAITING = 8
"""Number of waiting messages from which the peer is not read."""


class Inbox(Generic[MessageT]):
    """Messages that wait to be handled; iterate it to handle them, until it is closed.

    Attributes:
        on_hold: called with True when too many messages wait, with False when the last is handled.
    """

    def __init__(self) -> None:
        self.on_hold: Callable[[bool], None] | None = None
        self._items: deque[MessageT] = deque()
        self._filled, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._closed = False
        self._error: Exception | None = None

    def put(self, message: MessageT) -> None:
        """Adds a message."""
        self._items.append(message)
        self._filled.set()
        if len(self._items) >= MAX_WAITING and self._has_room.is_set():
            self._hold(True)

    async def room(self) -> None:
        """Waits until not too many messages wait."""
        await self._has_room.wait()

    def close(self, error: Exception | None = None) -> None:
        """Ends the iteration after the waiting messages, with an error if there is one."""
        self._closed, self._error = True, error
        self._filled.set()

    def _hold(self, held: bool) -> None:
        if held:
            self._has_room.clear()
        else:
            self._has_room.set()
        if self.on_hold is not None:
            self.on_hold(held)

    async def __aiter__(self) -> AsyncIterator[MessageT]:
        while True:
            while self._items:
                message = self._items.popleft()
                if not (self._items or self._has_room.is_set()):
                    self._hold(False)
                yield message
            if self._error is not None:
                raise self._error
            if self._closed:
                return
            self._filled.clear()
            await self._filled.wait()
