"""Requests that wait for each other's route, so that they are decided together: who waits, and
until when. The scheduler drives it by its event loop, the simulator in virtual time. Pure.

The first that has its prefixes waits for those that are being looked up for others when it has
them, not for later ones: under load there is always another one. Where its prompt would wait
anyway it waits for the window, too; whoever comes meanwhile is decided with it. So one that comes
alone while a worker is idle waits for nothing. Tests: tests/unit/policy/test_gathering.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NewType, TypeVar

from kvmesh.policy.joint import MAX_JOINT

T = TypeVar("T")

Seat = NewType("Seat", int)
"""A request in a gathering, from its question on."""

LOOKUP_S = 0.02
"""Longest time that one with its prefixes waits for those of others."""


class Gathering(Generic[T]):
    """Requests of one model that wait now. Every `now` is on one clock that never goes back.

    Args:
        hold_s: how long a request that has all it needs should wait for others to come. Called
            only where nobody's lookup is waited for: the answer costs a decision.
    """

    def __init__(self, hold_s: Callable[[T], float]) -> None:
        self._hold_s = hold_s
        self._num_seats = 0
        self._looking: set[Seat] = set()
        self._awaited: set[Seat] = set()
        self._ready: dict[Seat, T] = {}
        self._since = 0.0
        self._held_until = math.inf

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their decision, or for what it reads."""
        return len(self._looking) + len(self._ready)

    @property
    def closes_at(self) -> float | None:
        """When those that wait are to be decided on; None: there is nobody yet."""
        if not self._ready:
            return None
        if len(self._ready) >= MAX_JOINT:
            return self._since
        return self._since + LOOKUP_S if self._awaited else self._held_until

    def arrive(self) -> Seat:
        """A request asks; what its decision reads is looked up from now on."""
        self._num_seats += 1
        seat = Seat(self._num_seats)
        self._looking.add(seat)
        return seat

    def ready(self, seat: Seat, item: T, now: float) -> None:
        """A request that arrived has all that its decision reads."""
        assert seat in self._looking, f"seat {seat} did not arrive, or has left"
        self._looking.discard(seat)
        self._awaited.discard(seat)
        if not self._ready:
            self._awaited = self._looking.copy()
            self._since, self._held_until = now, math.inf
        self._ready[seat] = item
        if not self._awaited and len(self._ready) < MAX_JOINT:
            self._hold(item, now)

    def leave(self, seat: Seat) -> None:
        """A request has its decision, has hung up, or could not look up what it needs.

        Those who waited for it alone wait no more than if it had never come.
        """
        self._looking.discard(seat)
        self._ready.pop(seat, None)
        was_awaited = seat in self._awaited
        self._awaited.discard(seat)
        if was_awaited and not self._awaited and self._ready:
            self._hold(next(iter(self._ready.values())), self._since)

    def take(self, now: float) -> list[T]:
        """Those whose time has come, in the order in which they were ready; empty before that."""
        closes_at = self.closes_at
        if closes_at is None or now < closes_at:
            return []
        taken = list(self._ready.values())
        self._ready.clear()
        self._awaited.clear()
        return taken

    def _hold(self, item: T, since: float) -> None:
        # Where the question fails, those who wait with the one it was about are due.
        held_until, self._held_until = self._held_until, since
        self._held_until = min(held_until, since + self._hold_s(item))
