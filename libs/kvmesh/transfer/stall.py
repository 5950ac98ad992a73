"""Detects transfers without progress, or with too little. Tests: tests/unit/transfer/test_stall.py,
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

    Counts time in ticks of a quarter of it. A loop that was blocked for long ticks once, so a busy
    process does not take its own pause for the peer's.
    """

    def __init__(
        self,
        timeout_s: float,
        on_stall: Callable[[], None],
        moved: Callable[[], int] = lambda: 0,
    ) -> None:
        """`moved` returns the number of bytes that moved without calls of `progress`."""
        self._moved = moved
        self._seen = 0
        self._loop = asyncio.get_running_loop()
        self._tick_s = timeout_s / _STALL_TICKS
        self._on_stall = on_stall
        self._under_way = 0
        self._idle_ticks = 0
        self._timer: asyncio.TimerHandle | None = None

    def under_way(self) -> StallWatch:
        """Expects progress inside a `with` block."""
        return self

    def __enter__(self) -> None:
        # Costs a fifth of contextlib's managers; small frames enter it several times.
        self.begin()

    def __exit__(self, *failure: object) -> None:
        self.end()

    def begin(self) -> None:
        """Expects progress from now on, until a matching call of `end`."""
        if self._under_way == 0:
            self.progress()
        self._under_way += 1
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def end(self) -> None:
        """Ends one expectation of progress."""
        self._under_way -= 1

    def progress(self) -> None:
        """Records that something moved. Thread-safe."""
        self._idle_ticks = 0

    def close(self) -> None:
        """Stops all callbacks. May be called again."""
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
        # The first tick after progress is shorter than a whole one.
        if self._idle_ticks > _STALL_TICKS:
            self._on_stall()
        else:
            self._timer = self._loop.call_later(self._tick_s, self._tick)


@dataclass(slots=True, eq=False)
class Rest:
    """The rest of one transfer under way; its mover counts `num_bytes` down.

    Attributes:
        num_bytes: bytes left to move.
        given_up: why no more of it should be sent; empty while it continues.
    """

    num_bytes: int
    given_up: str = ""

    def check(self) -> None:
        """Raises LostError if the transfer was given up."""
        if self.given_up:
            raise LostError(self.given_up)


def excess_of(
    rests: Iterable[Rest], moved_bytes: int, window_s: float, patience_s: float
) -> list[Rest]:
    """Returns the transfers that would not end within `patience_s` at the speed of a window.

    Serves the transfers in their order: giving all of them up would waste what has arrived of
    those that finish in time once the others are gone. Returns none if nothing moved at all,
    because then there is no speed; `StallWatch` detects that case.
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
    """Calls back with transfers that would take too long at the speed of the last window.

    A starving link lets a few bytes through again and again, so it never stalls. Only transfers
    that
    were there for the whole window are judged: a link that had little to carry is not slow.
    """

    def __init__(
        self,
        window_s: float,
        patience_s: float,
        moved: Callable[[], int],
        on_starved: Callable[[str, Sequence[Rest]], None],
        held_back_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Starts with no transfer.

        Args:
            moved: returns the bytes moved so far; only rises.
            on_starved: called with the measurement and the transfers that are too slow, in order
                of their start. It is called again after each window, including transfers that were
                given up and have not ended.
            held_back_s: returns the seconds so far in which senders waited for something else:
                for a link, for a budget that others share; for a budget, for links. If that took
                half of a window, the window is not judged.
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
        """Number of transfers that are under way and not given up."""
        return sum(not rest.given_up for rest in self._under_way)

    def begin(self, rest: Rest) -> None:
        """Adds a transfer to watch, until `end`."""
        # A window per transfer would cost a timer each, so all share the running one.
        starts_window = self._timer is None
        if starts_window:
            self._watch()
        self._under_way[rest] = starts_window

    def end(self, rest: Rest) -> None:
        """Removes a transfer that ended or was given up."""
        del self._under_way[rest]

    def close(self) -> None:
        """Stops all callbacks. May be called again."""
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
