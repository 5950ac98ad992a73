"""Copies that are too long for the event loop, with a callback when they are made.

Tests: tests/unit/engine/test_copier.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class Copier(Protocol):
    """Makes copies, one after the other in the order of `start`."""

    def start(self, copy: Callable[[], None], done: Callable[[], None]) -> None:
        """Runs `copy` in any thread, and `done` on the event loop afterwards.

        Until then no one else may use the memory that `copy` reads and writes.
        """
        ...


class InlineCopier:
    """Copies at once: for tools and tests that have no event loop."""

    def start(self, copy: Callable[[], None], done: Callable[[], None]) -> None:
        """See `Copier.start`."""
        copy()
        done()


class ThreadCopier:
    """Copies in a thread of its own, while the event loop and the engine's thread continue."""

    def __init__(self, name: str = "swap") -> None:
        self._jobs: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._wake = asyncio.Event()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.on_done: Callable[[], None] | None = None
        """Called after each `done`."""

    def start(self, copy: Callable[[], None], done: Callable[[], None]) -> None:
        """See `Copier.start`."""
        self._jobs.append((copy, done))
        self._wake.set()

    async def run(self) -> None:
        """Copies until cancelled. An error of a copy ends it, and with it the worker."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._wake.clear()
                while self._jobs:
                    copy, done = self._jobs.popleft()
                    # A cancelled await leaves the copy running; the shutdown below waits for it.
                    await asyncio.shield(loop.run_in_executor(self._executor, copy))
                    done()
                    if self.on_done is not None:
                        self.on_done()
                await self._wake.wait()
        finally:
            self._executor.shutdown(wait=True)
