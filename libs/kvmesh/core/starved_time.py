"""Measures how long this process waited for a core, from the kernel's accounting of its threads.

Tests: tests/unit/core/test_starved_time.py.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.core.silence import Threads

LOOK_S = 0.25
"""Minimum seconds between two looks: a look at dozens of threads takes milliseconds."""


class StarvedTime:
    """Total seconds for which the longest-waiting thread was kept from a core.

    Args:
        read: returns the kernel's accounting of this process's threads.
    """

    def __init__(self, read: Callable[[], Threads]) -> None:
        self._read = read
        self._looked_at: float | None = None
        self._waited: dict[int, float] = {}
        self._total_s = 0.0

    def total_s(self, now: float) -> float:
        """Returns the total up to the last look; between two looks the longest wait counts."""
        if self._looked_at is not None and now < self._looked_at + LOOK_S:
            return self._total_s
        self._looked_at = now
        before = self._waited
        self._waited = {name: each.wait_s for name, each in self._read().items()}
        # The time that a thread waited before it was first seen may be long ago.
        waited = [since - before[name] for name, since in self._waited.items() if name in before]
        self._total_s += max([0.0, *waited])
        return self._total_s
