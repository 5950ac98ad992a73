"""Measures the utilisation of a cluster's egress link from the bytes sent and the bytes waiting.

The configured bandwidth is what the link carries on a good day. When it carries less, few bytes
leave although the link is full. Only two signs show that: bytes wait to leave, and some are in
flight all the time.
Source: PrfaaS 3.4.3 point 2 (congestion is to be seen, not assumed).
Tests: tests/unit/policy/test_egress.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECOVER = 1.25
"""Factor per second by which a bandwidth measured as low recovers until the next measurement. Also
the assumed headroom, per second, over the rate of a cycle in which all waiting bytes left.
"""

MIN_SHARE = 0.01
"""Smallest measured bandwidth as a fraction of the configured one: below it the link is cut, and
this avoids a division by 0."""

JAM_CYCLES = 4
"""Number of the latest cycles of a jam over which its rate is measured: enough for transfers that
arrive in bursts, few enough to notice a recovered link before the queue is gone.
"""

IN_USE = 0.9
"""Fraction of the time with KV in flight that counts as all the time: workers that share a link
leave it idle now and then while they compute.
"""

LONG_S = 0.25
"""Mean seconds in flight above which KV waits for the link, not only for its turn at a sender: many
workers, each slower than the link, may keep KV in flight all the time and never fill it.
"""


@dataclass(frozen=True, slots=True)
class _Cycle:
    """The arguments of one call of `observe`."""

    sent: int
    waiting: int
    elapsed_s: float
    sending: float


@dataclass(slots=True)
class EgressMeter:
    """Measures the egress link of one cluster.

    Args:
        configured: bandwidth in bytes per second on a good day.
    """

    configured: float
    _capacity: float = 0.0
    _waiting: int = 0
    _jam: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=JAM_CYCLES))
    _last: deque[_Cycle] = field(default_factory=lambda: deque(maxlen=JAM_CYCLES))

    def __post_init__(self) -> None:
        self._capacity = self.configured

    @property
    def capacity(self) -> float:
        """Estimated bytes per second that the link carries now."""
        return self._capacity

    def observe(self, sent: int, waiting: int, elapsed_s: float, sending: float = 0.0) -> float:
        """Adds the measurements of a cycle and returns the link's utilisation, 0..1.

        Args:
            sent: bytes that left in the cycle.
            waiting: bytes that wait to leave at its end.
            elapsed_s: length of the cycle in seconds, above 0.
            sending: reported fraction of the cycle with KV in flight, 0..1.
        """
        before, self._waiting = self._waiting, waiting
        self._last.append(_Cycle(sent, waiting, elapsed_s, sending))
        if before > sent or (self._jam and waiting and before == sent > 0):
            # Some bytes that waited at the start did not leave: the link was in use throughout. In
            # a jam this also holds if exactly those bytes left: pieces are counted on arrival, so
            # some of the bytes that wait now are in flight.
            self._jam.append((sent, elapsed_s))
            # Transfers are counted when they arrive or are reported, so a single cycle may count
            # none of them. Its rate is not usable.
            if len(self._jam) > 1:
                found = max(self._jam_rate(), MIN_SHARE * self.configured)
                self._capacity = min(found, self.configured)
            return 1.0
        if len(self._jam) > 1:
            # The last waiting bytes left: they were in flight in earlier cycles as well.
            self._jam.append((sent, elapsed_s))
            rate = least = self._jam_rate()
        else:
            rate = sent / elapsed_s
            least = rate * RECOVER**elapsed_s
        self._jam.clear()
        recovered = self._capacity * RECOVER**elapsed_s
        self._capacity = min(max(recovered, least), self.configured)
        # All waiting bytes left, so it is unknown how much more the link could carry.
        return 1.0 if self._is_in_use() else min(rate / self._capacity, 1.0)

    def _is_in_use(self) -> bool:
        """Whether KV was in flight nearly throughout the last cycles, and each part for long.

        This finds a full link although little waits: workers that start the next send when the last
        one ends leave less than a cycle's bytes waiting.
        """
        if len(self._last) < JAM_CYCLES:
            return False
        elapsed_s = sum(each.elapsed_s for each in self._last)
        sending_s = sum(each.sending * each.elapsed_s for each in self._last)
        # Little's law: mean bytes waiting / bytes sent per second = mean seconds in flight.
        waited = sum(each.waiting * each.elapsed_s for each in self._last)
        sent = sum(each.sent for each in self._last)
        return sending_s > IN_USE * elapsed_s and waited > LONG_S * sent

    def _jam_rate(self) -> float:
        """Returns the bytes per second over the last cycles of the jam."""
        return sum(sent for sent, _ in self._jam) / sum(elapsed for _, elapsed in self._jam)
