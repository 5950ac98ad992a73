"""A host whose workers share its cores, with each other and with what stands before them: who
computes beside others takes longer.

Tests: tests/unit/sim/test_host.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from kvmesh.sim.profile import Sharing

FRONT_WINDOW_S = 0.25
"""What the front has computed of late stands for what it computes now."""

FRONT_PROCESSES = 5
"""Gateway, scheduler, kvmanager, Redis and the client."""


class Sharer(Protocol):
    """A step loop of a worker of the host."""

    def others_changed(self) -> None:
        """Another worker of the host began to compute, or stopped."""
        ...


class Host:
    """Who computes now, of the workers of one host.

    Args:
        now: virtual seconds.
    """

    def __init__(self, sharing: Sharing, now: Callable[[], float]) -> None:
        self.sharing = sharing
        self._now = now
        self._front_cores = 0.0
        self._front_at = 0.0
        self._sharers: list[Sharer] = []
        self._busy: set[Sharer] = set()

    def add(self, sharer: Sharer) -> None:
        """A worker comes to the host."""
        self._sharers.append(sharer)

    def note(self, sharer: Sharer, *, is_busy: bool) -> None:
        """The worker computes from now on, or does not; may be repeated."""
        if is_busy == (sharer in self._busy):
            return
        (self._busy.add if is_busy else self._busy.remove)(sharer)
        for each in self._sharers:
            if each is not sharer:
                each.others_changed()

    # --- what stands before the workers ------------------------------------------------------

    def note_request(self) -> None:
        """A request came."""
        front = self.sharing.front
        self._spend(0.0 if front is None else front.request_s)

    def note_tokens(self, count: int) -> None:
        """So many tokens go to clients."""
        front = self.sharing.front
        self._spend(0.0 if front is None else count * front.token_s)

    def note_refusals(self, count: int) -> None:
        """So many workers were asked and refused."""
        front = self.sharing.front
        self._spend(0.0 if front is None else count * front.ask_s)

    def _spend(self, seconds: float) -> None:
        if seconds:
            self._front_cores = self.front_cores + seconds / FRONT_WINDOW_S
            self._front_at = self._now()

    @property
    def front_cores(self) -> float:
        """Cores that the front uses now."""
        return self._front_cores * math.exp((self._front_at - self._now()) / FRONT_WINDOW_S)

    # --- how long work takes -----------------------------------------------------------------

    @property
    def message_stretch(self) -> float:
        """How many times as long a control message takes as on an idle host.

        Who handles it wants a core while all workers that compute keep theirs.
        """
        front = self.sharing.front
        if front is None:
            return 1.0
        return max((len(self._busy) + 1 + self.front_cores) / front.cores, 1.0)

    def prefill_stretch(self, sharer: Sharer) -> float:
        """How many times as long a chunk of a prompt takes as on a host of its own."""
        return self._stretch(self.sharing.prefill, sharer)

    def decode_stretch(self, sharer: Sharer) -> float:
        """As `prefill_stretch`, of a decode step."""
        return self._stretch(self.sharing.decode, sharer)

    def _stretch(self, by_each: float, sharer: Sharer) -> float:
        others = len(self._busy) - (sharer in self._busy)
        alone = 1 + (by_each - 1) * others
        front = self.sharing.front
        # Everybody who computes keeps a core busy; of too few cores each gets an equal part.
        return (
            alone if front is None else alone * crowding(1 + others, self.front_cores, front.cores)
        )


def crowding(num_workers: int, front_cores: float, cores: float) -> float:
    """How many times as long work takes where workers and front want more cores than there are.

    A scheduler that is fair serves first who wants less than an equal part: the front, whose
    processes mostly wait. The workers divide what is left, so that never more is used than there
    is, and each keeps at least an equal part of all.
    """
    left = max(cores - front_cores, cores * num_workers / (num_workers + FRONT_PROCESSES))
    return max(num_workers / left, 1.0)
