"""How long this process waited for a core, by what the kernel counts of its threads.

Tests: tests/unit/core/test_starved_time.py.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.core.silence import Threads

LOOK_S = 0.25
"""A look at dozens of threads takes milliseconds, so it is not taken more often."""


class StarvedTime:
    """Seconds in which the thread that waited longest was kept from a core.

    Args:
        read: what the kernel tells of the threads of this process.
    """

    def __init__(self, read: Callable[[], Threads]) -> None:
        self._read = read
        self._looked_at: float | None = None
        self._waited: dict[int, float] = {}
        self._total_s = 0.0

    def total_s(self, now: float) -> float:
        """All until the last look; between two of them the thread that waited longest counts."""
        if self._looked_at is not None and now < self._looked_at + LOOK_S:
            return self._total_s
        self._looked_at = now
        before = self._waited
        self._waited = {name: each.wait_s for name, each in self._read().items()}
        # What a thread waited before it was first seen is not known to be of late.
        waited = [since - before[name] for name, since in self._waited.items() if name in before]
        self._total_s += max([0.0, *waited])
        return self._total_s
