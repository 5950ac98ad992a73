"""Copies between a pool and host memory that are made when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


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
