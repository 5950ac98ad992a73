"""Copies between a pool and host memory, and timers, that go when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace


class LateCopier:
    """A `Copier` whose copies wait."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()

    def start(self, copy: Callable[[], None], done: Callable[[], None]) -> None:
        """See `Copier.start`."""
        self.jobs.append((copy, done))

    def run_one(self) -> None:
        """Makes the oldest copy."""
        copy, done = self.jobs.popleft()
        copy()
        done()

    def catch_up(self) -> None:
        """Makes all of them."""
        while self.jobs:
            self.run_one()


class LateTimers:
    """The timers of an event loop."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def call_later(self, _seconds: float, call: Callable[..., None], *args: object) -> object:
        """See `asyncio.loop.call_later`."""

        def go_off() -> None:
            call(*args)

        def cancel() -> None:
            if go_off in self.waiting:
                self.waiting.remove(go_off)

        self.waiting.append(go_off)
        return SimpleNamespace(cancel=cancel)

    def go_off(self) -> None:
        """Lets the oldest one go off."""
        self.waiting.pop(0)()
