"""Notices that nothing moves, or too little. Tests: tests/unit/transfer/test_stall.py,
tests/integration/test_transfer_failures.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

_STALL_TICKS = 4


class StallWatch:
    """Calls back when something is under way and nothing has moved for `timeout_s`.

    Time is counted in ticks of a quarter of it: a loop that was blocked for long ticks once, so a
    busy process does not take its own pause for the peer's.
    """

    def __init__(
        self,
        timeout_s: float,
        on_stall: Callable[[], None],
        moved: Callable[[], int] = lambda: 0,
    ) -> None:
        """`moved` counts bytes that nobody reports by `progress`."""
        self._moved = moved
        self._seen = 0
        self._loop = asyncio.get_running_loop()
        self._tick_s = timeout_s / _STALL_TICKS
        self._on_stall = on_stall
        self._under_way = 0
        self._idle_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def under_way(self) -> StallWatch:
        """While inside of `with`, progress is expected."""
        return self

    def __enter__(self) -> None:
        # Not by contextlib, at a fifth of its cost: small frames enter it several times.
        self.begin()

    def __exit__(self, *failure: object) -> None:
        self.end()

    def begin(self) -> None:
        """From here on progress is expected, until as many calls of `end`."""
        if self._under_way == 0:
            self.progress()
        self._under_way += 1
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def end(self) -> None:
        """One thing less is under way."""
        self._under_way -= 1

    def progress(self) -> None:
        """Something moved. May be called from any thread."""
        self._idle_ticks = 0

    def close(self) -> None:
        """No more callbacks. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if self._under_way == 0:
            return
        moved = self._moved()
        if moved != self._seen:
            self._seen = moved
            self.progress()
        self._idle_ticks += 1
        # The first tick after progress is not a whole one.
        if self._idle_ticks > _STALL_TICKS:
            self._on_stall()
        else:
            self._timer = self._loop.call_later(self._tick_s, self._tick)


def is_starved(moved_bytes: int, left_bytes: int, window_s: float, patience_s: float) -> bool:
    """Whether what is left takes longer than `patience_s`, as slowly as bytes moved in a window.

    Where nothing moved at all nothing is known of a pace: that is `StallWatch`'s to notice.
    """
    return 0 < moved_bytes * patience_s < left_bytes * window_s


@dataclass(slots=True, eq=False)
class Rest:
    """What is left of one thing under way; who moves it counts it down.

    Attributes:
        is_whole: it was under way when the window began.
    """

    num_bytes: int
    is_whole: bool


class PaceWatch:
    """Calls back when what is under way would take too long at the pace of the last window.

    A link that starves lets some bytes through again and again, so that it never stalls. Only what
    was there for the whole window is judged: a link that had little to carry is not slow.
    """

    def __init__(
        self,
        window_s: float,
        patience_s: float,
        moved: Callable[[], int],
        on_starved: Callable[[str], None],
    ) -> None:
        """Nothing is under way.

        Args:
            moved: bytes so far; only rises.
            on_starved: told what was measured.
        """
        self._window_s, self._patience_s = window_s, patience_s
        self._moved, self._on_starved = moved, on_starved
        self._under_way: set[Rest] = set()
        self._seen = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, num_bytes: int) -> Rest:
        """So many more bytes are to move, until `end`."""
        # To start a window that runs anew would cost a timer each.
        rest = Rest(num_bytes, is_whole=self._timer is None)
        if rest.is_whole:
            self._watch()
        self._under_way.add(rest)
        return rest

    def end(self, rest: Rest) -> None:
        """They moved, or are not to move any more."""
        self._under_way.remove(rest)

    def close(self) -> None:
        """No more callbacks. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        self._seen = self._moved()
        self._timer = asyncio.get_running_loop().call_later(self._window_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._under_way:
            return
        left = sum(rest.num_bytes for rest in self._under_way if rest.is_whole)
        came = self._moved() - self._seen
        for rest in self._under_way:
            rest.is_whole = True
        self._watch()
        if is_starved(came, left, self._window_s, self._patience_s):
            self._on_starved(f"{came} bytes in {self._window_s:g} s, {left} are left")
