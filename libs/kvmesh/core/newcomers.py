"""Limits the connections of one port whose peers have not identified themselves yet.

Any host that reaches a port can open connections and send nothing. A real peer sends at once, so
beyond the limit the oldest silent connection is cut. Pure.
Tests: tests/unit/core/test_newcomers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

NewcomerT = TypeVar("NewcomerT", bound=Hashable)

MAX_NEWCOMERS = 128
"""Maximum number of unidentified connections at one port; a peer of the mesh identifies itself
within milliseconds."""


class Newcomers(Generic[NewcomerT]):
    """The unidentified connections of one port.

    Args:
        cut: closes a connection; called after its removal, at most once for each.
        limit: maximum number of connections at once.
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
        """Adds a connection; cuts the oldest if there are too many."""
        self._waiting[newcomer] = None
        if len(self._waiting) > self._limit:
            self.cut_oldest()

    def leave(self, newcomer: NewcomerT) -> None:
        """Removes a connection that was identified or has ended; may be called again."""
        self._waiting.pop(newcomer, None)

    def cut_oldest(self) -> None:
        """Cuts the oldest connection, if there is one."""
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            self._waiting.pop(oldest, None)  # another thread may have just removed it
            self.num_cut += 1
            self._cut(oldest)
