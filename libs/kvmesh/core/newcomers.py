"""Connections whose peers have not said yet who they are: few at a time, the oldest gives way.

Anybody who reaches a port can open connections and say nothing. Who has something to say does so at
once: of too many silent ones the oldest is the one that is missed least. Pure.
Tests: tests/unit/core/test_newcomers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

NewcomerT = TypeVar("NewcomerT", bound=Hashable)

MAX_NEWCOMERS = 128
"""As many may be unknown at one port; a peer of the mesh is so for some milliseconds."""


class Newcomers(Generic[NewcomerT]):
    """Those of one port.

    Args:
        cut: ends a connection; called when it has left, at most once for each.
        limit: most of them at once.
    """

    def __init__(self, cut: Callable[[NewcomerT], object], limit: int = MAX_NEWCOMERS) -> None:
        assert limit > 0, "nobody could come"
        self._cut = cut
        self._limit = limit
        self._waiting: dict[NewcomerT, None] = {}
        self.num_cut = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, newcomer: NewcomerT) -> bool:
        return newcomer in self._waiting

    def enter(self, newcomer: NewcomerT) -> None:
        """One more connection; the oldest is cut if there are too many."""
        self._waiting[newcomer] = None
        if len(self._waiting) > self._limit:
            self.cut_oldest()

    def leave(self, newcomer: NewcomerT) -> None:
        """It is known now, or has ended. May be called again."""
        self._waiting.pop(newcomer, None)

    def cut_oldest(self) -> None:
        """Ends the one that has waited longest; nothing without any."""
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            self._waiting.pop(oldest, None)  # where threads serve, it may just have left
            self.num_cut += 1
            self._cut(oldest)
