"""A host whose workers share its cores with each other and with the front (gateway, scheduler and
client): work takes longer beside other work.

Tests: tests/unit/sim/test_host.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from kvmesh.sim.profile import Sharing

FRONT_WINDOW_S = 0.25
"""Seconds over which the front's recent computing is averaged to give its present use of cores."""

FRONT_PROCESSES = 5
"""Number of the front's processes: gateway, scheduler, kvmanager, Redis and the client."""


class Sharer(Protocol):
    """The step loop of a worker on the host."""

    def others_changed(self) -> None:
        """Called when another worker of the host starts or stops computing."""
        ...


class Host:
    """Tracks the workers of one host that compute now.

    Args:
        now: returns the virtual time in seconds.
    """

    def __init__(self, sharing: Sharing, now: Callable[[], float]) -> None:
        self.sharing = sharing
        self._now = now
        self._front_cores = 0.0
        self._front_at = 0.0
        self._sharers: list[Sharer] = []
        self._busy: set[Sharer] = set()

    def add(self, sharer: Sharer) -> None:
        """Adds a worker to the host."""
        self._sharers.append(sharer)

    def note(self, sharer: Sharer, *, is_busy: bool) -> None:
        """Records that a worker starts or stops computing; may be repeated."""
        if is_busy == (sharer in self._busy):
            return
        (self._busy.add if is_busy else self._busy.remove)(sharer)
        for each in self._sharers:
            if each is not sharer:
                each.others_changed()

    # --- the front ---------------------------------------------------------------------------

    def note_request(self) -> None:
        """Counts the front's work for an arriving request."""
        front = self.sharing.front
        self._spend(0.0 if front is None else front.request_s)

    def note_tokens(self, count: int) -> None:
        """Counts the front's work for tokens sent to clients."""
        front = self.sharing.front
        self._spend(0.0 if front is None else count * front.token_s)

    def note_refusals(self, count: int) -> None:
        """Counts the front's work for refused offers."""
        front = self.sharing.front
        self._spend(0.0 if front is None else count * front.ask_s)

    def _spend(self, seconds: float) -> None:
        if seconds:
            self._front_cores = self.front_cores + seconds / FRONT_WINDOW_S
            self._front_at = self._now()

    @property
    def front_cores(self) -> float:
        """Number of cores that the front uses now."""
        return self._front_cores * math.exp((self._front_at - self._now()) / FRONT_WINDOW_S)

    # --- how long work takes -----------------------------------------------------------------

    @property
    def message_stretch(self) -> float:
        """Factor on the time of a control message over an idle host.

        Its receiver needs a core while all computing workers keep theirs.
        """
        front = self.sharing.front
        if front is None:
            return 1.0
        return max((len(self._busy) + 1 + self.front_cores) / front.cores, 1.0)

    def prefill_stretch(self, sharer: Sharer) -> float:
        """Returns the factor on the time of a prompt's chunk over a host of its own."""
        return self._stretch(self.sharing.prefill, sharer)

    def decode_stretch(self, sharer: Sharer) -> float:
        """Returns the factor on the time of a decode step over a host of its own."""
        return self._stretch(self.sharing.decode, sharer)

    def _stretch(self, by_each: float, sharer: Sharer) -> float:
        others = len(self._busy) - (sharer in self._busy)
        alone = 1 + (by_each - 1) * others
        front = self.sharing.front
        # Each computing worker keeps one core busy; too few cores are shared equally.
        return (
            alone if front is None else alone * crowding(1 + others, self.front_cores, front.cores)
        )


def crowding(num_workers: int, front_cores: float, cores: float) -> float:
    """Returns the factor on the time of work if workers and front want more cores than exist.

    A fair CPU scheduler first serves processes that want less than an equal share: the front, whose
    processes mostly wait. The workers divide the rest, and each keeps at least an equal share of
    all cores.
    """
    left = max(cores - front_cores, cores * num_workers / (num_workers + FRONT_PROCESSES))
    return max(num_workers / left, 1.0)
