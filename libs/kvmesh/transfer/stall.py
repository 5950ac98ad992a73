"""Notices that nothing moves, or too little. Tests: tests/unit/transfer/test_stall.py,
tests/integration/test_transfer_failures.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvmesh.core.errors import LostError

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


@dataclass(slots=True, eq=False)
class Rest:
    """What is left of one thing under way; who moves it counts it down.

    Attributes:
        num_bytes: left.
        given_up: why no more of it should be sent; empty while it goes on.
    """

    num_bytes: int
    given_up: str = ""

    def check(self) -> None:
        """Raises LostError when it was given up."""
        if self.given_up:
            raise LostError(self.given_up)


def excess_of(
    rests: Iterable[Rest], moved_bytes: int, window_s: float, patience_s: float
) -> list[Rest]:
    """Those that would not be over within `patience_s`, as slowly as bytes moved in a window.

    Who came first is served first: to give all of them up would waste what has arrived of those
    that will be there in time once the others have gone. Where nothing moved at all nothing is
    known of a pace: that is `StallWatch`'s to notice.
    """
    if moved_bytes <= 0:
        return []
    room = moved_bytes * patience_s / window_s
    excess = []
    for rest in rests:
        if rest.num_bytes <= room:
            room -= rest.num_bytes
        else:
            excess.append(rest)
    return excess


class PaceWatch:
    """Calls back with what would take too long at the pace of the last window.

    A link that starves lets some bytes through again and again, so that it never stalls. Only what
    was there for the whole window is judged: a link that had little to carry is not slow.
    """

    def __init__(
        self,
        window_s: float,
        patience_s: float,
        moved: Callable[[], int],
        on_starved: Callable[[str, Sequence[Rest]], None],
        held_back_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Nothing is under way.

        Args:
            moved: bytes so far; only rises.
            held_back_s: seconds so far in which senders waited for something else: over a link for
                a budget that others share, within a budget for links. A window that was half spent
                so says nothing of what is watched.
            on_starved: told what was measured, and for what it is too slow, in order of beginning.
                Again after each window, with those that were given up and are not over.
        """
        self._window_s, self._patience_s = window_s, patience_s
        self._moved = moved
        self._on_starved = on_starved
        self._held_back_s = held_back_s
        self._held_before = self._since = 0.0
        self._under_way: dict[Rest, bool] = {}  # by beginning; true: since before the window
        self._seen = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_going_on(self) -> int:
        """Under way, and not given up."""
        return sum(not rest.given_up for rest in self._under_way)

    def begin(self, rest: Rest) -> None:
        """So many more bytes are to move, until `end`."""
        # To start a window that runs anew would cost a timer each.
        starts_window = self._timer is None
        if starts_window:
            self._watch()
        self._under_way[rest] = starts_window

    def end(self, rest: Rest) -> None:
        """They moved, or are not to move any more."""
        del self._under_way[rest]

    def close(self) -> None:
        """No more callbacks. May be called again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._seen, self._held_before, self._since = self._moved(), self._held_back_s(), loop.time()
        self._timer = loop.call_later(self._window_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._under_way:
            return
        came = self._moved() - self._seen
        judged = [rest for rest, is_whole in self._under_way.items() if is_whole]
        held_s = self._held_back_s() - self._held_before
        if 2 * held_s > asyncio.get_running_loop().time() - self._since:
            judged = []
        going_on = [rest for rest in judged if not rest.given_up]
        left = sum(rest.num_bytes for rest in going_on)
        excess = excess_of(going_on, came, self._window_s, self._patience_s)
        excess += [rest for rest in judged if rest.given_up]
        self._under_way = dict.fromkeys(self._under_way, True)
        self._watch()
        if excess:
            self._on_starved(f"{came} bytes in {self._window_s:g} s, {left} are left", excess)
