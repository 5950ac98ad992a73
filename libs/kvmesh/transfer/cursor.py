"""Walks the bytes of several memories in order. Tests: tests/unit/transfer/test_cursor.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

MAX_BUFFERS = 512
"""Maximum number of buffers of one gather or scatter call; the kernel's limit is 1024."""


class ViewCursor:
    """A position in the concatenation of views; copies nothing."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._left = deque(view.cast("B") for view in views if view.nbytes)

    @property
    def at_end(self) -> bool:
        """Whether no byte is left."""
        return not self._left

    def batch(self, max_bytes: int) -> list[memoryview]:
        """Returns the next bytes as views, at most `max_bytes`; does not move."""
        taken: list[memoryview] = []
        for view in self._left:
            if len(view) >= max_bytes or len(taken) == MAX_BUFFERS - 1:
                taken.append(view[:max_bytes])
                break
            taken.append(view)
            max_bytes -= len(view)
        return taken

    def advance(self, num_bytes: int) -> None:
        """Moves forward by `num_bytes`, which must be left."""
        while num_bytes:
            head = self._left[0]
            if num_bytes < len(head):
                self._left[0] = head[num_bytes:]
                return
            num_bytes -= len(head)
            self._left.popleft()

    def take(self, num_bytes: int) -> list[memoryview]:
        """Returns exactly the next `num_bytes` as views and moves past them."""
        taken: list[memoryview] = []
        while num_bytes:
            views = self.batch(num_bytes)
            size = sum(len(view) for view in views)
            self.advance(size)
            taken += views
            num_bytes -= size
        return taken
