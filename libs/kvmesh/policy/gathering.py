"""Gathers requests that are routed together, and says until when they wait for each other. The
scheduler drives it by its event loop, the simulator in virtual time. Pure.

A request is ready when its prefixes were looked up. The first ready request waits for the lookups
in
progress at that moment, not for later ones: under load there is always another one. If its prompt
would wait anyway, it also waits for the window. All requests that become ready meanwhile are
decided with it. So a request that arrives alone while a worker is idle does not wait.
Tests: tests/unit/policy/test_gathering.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NewType, TypeVar

from kvmesh.policy.joint import MAX_JOINT

T = TypeVar("T")

Seat = NewType("Seat", int)
"""Number of a request in a gathering, from its arrival on."""

LOOKUP_S = 0.02
"""Maximum seconds that a ready request waits for the lookups of others."""


class Gathering(Generic[T]):
    """Waiting requests of one model. Every `now` is on one monotonic clock.

    Args:
        hold_s: returns the seconds that a ready request should wait for others to arrive. Called
            only when no lookup is awaited, because each call costs a route decision.
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
        """Number of requests that wait for their decision or for their lookup."""
        return len(self._looking) + len(self._ready)

    @property
    def closes_at(self) -> float | None:
        """Time at which the ready requests are decided; None: there are none."""
        if not self._ready:
            return None
        if len(self._ready) >= MAX_JOINT:
            return self._since
        return self._since + LOOKUP_S if self._awaited else self._held_until

    def arrive(self) -> Seat:
        """Adds a request whose lookup begins now."""
        self._num_seats += 1
        seat = Seat(self._num_seats)
        self._looking.add(seat)
        return seat

    def ready(self, seat: Seat, item: T, now: float) -> None:
        """Marks a request as ready: its lookup has ended.

        Args:
            item: the inputs of its decision.
        """
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
        """Removes a request that has its decision, hung up, or failed its lookup.

        Requests that waited only for its lookup wait no longer than if it had never arrived.
        """
        self._looking.discard(seat)
        self._ready.pop(seat, None)
        was_awaited = seat in self._awaited
        self._awaited.discard(seat)
        if was_awaited and not self._awaited and self._ready:
            self._hold(next(iter(self._ready.values())), self._since)

    def take(self, now: float) -> list[T]:
        """Returns the requests to decide now, in the order of becoming ready; empty before that."""
        closes_at = self.closes_at
        if closes_at is None or now < closes_at:
            return []
        taken = list(self._ready.values())
        self._ready.clear()
        self._awaited.clear()
        return taken

    def _hold(self, item: T, since: float) -> None:
        # If `hold_s` raises, the requests that wait with this one are due at once.
        held_until, self._held_until = self._held_until, since
        self._held_until = min(held_until, since + self._hold_s(item))
