"""How full the way out of a cluster is, from what its workers sent and what they have yet to send.

A configured bandwidth says what the way can carry on a good day. When it carries less, what leaves
is little and the way is full all the same; only what waits to leave tells.
Source: PrfaaS 3.4.3 point 2 (congestion is to be seen, not assumed).
Tests: tests/unit/policy/test_egress.py.
"""

from __future__ import annotations

from dataclasses import dataclass

RECOVER = 1.25
"""What a bandwidth that was found to be low may be each second after, until it is found again."""

MIN_SHARE = 0.01
"""Of the configured bandwidth: with less the way is cut, and a division by nothing helps nobody."""


@dataclass(slots=True)
class EgressMeter:
    """Measures one way out.

    Args:
        configured: bytes per second of a good day.
    """

    configured: float
    _capacity: float = 0.0
    _waiting: int = 0
    _busy_bytes: float = 0.0
    _busy_s: float = 0.0
    _busy_cycles: int = 0

    def __post_init__(self) -> None:
        self._capacity = self.configured

    @property
    def capacity(self) -> float:
        """Bytes per second that it carries now, as far as can be told."""
        return self._capacity

    def observe(self, sent: int, waiting: int, elapsed_s: float) -> float:
        """Takes a cycle, and says which share of the way was in use, 0..1.

        Args:
            sent: bytes that left in it.
            waiting: bytes that are to leave and have not, at its end.
            elapsed_s: its length, above 0.
        """
        before, self._waiting = self._waiting, waiting
        if before > sent:
            # What waited when the cycle began did not all leave: the way was in use throughout.
            self._busy_bytes += sent
            self._busy_s += elapsed_s
            # Transfers are counted when they arrive or are reported, so that in a single such cycle
            # nothing may have left: it says nothing of speed.
            if self._busy_cycles:
                found = max(self._busy_bytes / self._busy_s, MIN_SHARE * self.configured)
                self._capacity = min(found, self.configured)
            self._busy_cycles += 1
            return 1.0
        rate = sent / elapsed_s
        if self._busy_cycles > 1:
            # The last of what waited: it was on its way in the cycles before as well.
            rate = (self._busy_bytes + sent) / (self._busy_s + elapsed_s)
        self._busy_cycles = 0
        self._busy_bytes = self._busy_s = 0.0
        recovered = self._capacity * RECOVER**elapsed_s
        self._capacity = min(max(recovered, rate), self.configured)
        return min(rate / self._capacity, 1.0)
