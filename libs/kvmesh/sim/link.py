"""A link whose bandwidth is shared evenly by all transfers on it.

Tests: tests/unit/sim/test_link.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvmesh.sim.events import EventQueue, Timer


class SharedLink:
    """Processor sharing: n transfers get one n-th of the bandwidth each.

    `_served` counts the bytes that a transfer would have got since the start. A transfer of `size`
    bytes that begins at `_served` = s ends when `_served` reaches s + size, whichever other
    transfers begin and end.
    """

    def __init__(self, events: EventQueue, bytes_per_s: float) -> None:
        self._events = events
        self._bytes_per_s = bytes_per_s
        self._served = 0.0
        self._updated_at = 0.0
        self._active: list[tuple[float, int, Callable[[], None]]] = []
        self._num_sent = 0
        self._timer: Timer | None = None
        self.bytes_total = 0.0
        self.busy_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Present bandwidth."""
        return self._bytes_per_s

    @property
    def bytes_left(self) -> float:
        """Bytes of all transfers that have not arrived yet."""
        self._advance()
        return sum(max(target - self._served, 0.0) for target, _, _ in self._active)

    def send(self, size: float, done: Callable[[], None]) -> None:
        """Starts a transfer and calls `done` when its last byte has arrived."""
        self._advance()
        self._num_sent += 1
        heapq.heappush(self._active, (self._served + size, self._num_sent, done))
        self._plan()

    def set_bandwidth(self, bytes_per_s: float) -> None:
        """Changes the bandwidth for the rest of all transfers."""
        self._advance()
        self._bytes_per_s = bytes_per_s
        self._plan()

    def use_until_now(self) -> tuple[float, float]:
        """Returns the bytes carried and the seconds in use since the start."""
        self._advance()
        return self.bytes_total, self.busy_s

    def _advance(self) -> None:
        elapsed = self._events.now() - self._updated_at
        self._updated_at = self._events.now()
        if self._active and elapsed > 0:
            self._served += elapsed * self._bytes_per_s / len(self._active)
            self.bytes_total += elapsed * self._bytes_per_s
            self.busy_s += elapsed

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._active:
            return
        left = max(self._active[0][0] - self._served, 0.0)
        self._timer = self._events.after(
            left * len(self._active) / self._bytes_per_s, self._first_done
        )

    def _first_done(self) -> None:
        self._advance()
        target, _, done = heapq.heappop(self._active)
        # Rounding must not leave a remainder too small for the clock to resolve.
        self._served = max(self._served, target)
        self._plan()
        done()
