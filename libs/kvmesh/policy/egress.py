"""How full the way out of a cluster is, from what its workers sent and what they have yet to send.

A configured bandwidth says what the way can carry on a good day. When it carries less, what leaves
is little and the way is full all the same; only what waits to leave tells, and that some of it is
on its way all the time.
Source: PrfaaS 3.4.3 point 2 (congestion is to be seen, not assumed).
Tests: tests/unit/policy/test_egress.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECOVER = 1.25
"""What a bandwidth that was found to be low may be each second after, until it is found again; and
what a way may carry, over what left it, when all of that did leave.
"""

MIN_SHARE = 0.01
"""Of the configured bandwidth: with less the way is cut, and a division by nothing helps nobody."""

JAM_CYCLES = 4
"""Cycles of a jam that its rate is taken from: enough for transfers that arrive in lumps, few
enough to see a way that carries more again before all that waits is gone.
"""

IN_USE = 0.9
"""Share of some cycles with KV on its way that is as good as all of them: a way that workers share
is left alone now and then while they compute.
"""

LONG_S = 0.25
"""On its way for as long on average, KV waits for the way, and not just for its turn at a sender:
many workers, each slower than the way, may have KV on it all the time and never fill it.
"""


@dataclass(frozen=True, slots=True)
class _Cycle:
    """What `observe` takes."""

    sent: int
    waiting: int
    elapsed_s: float
    sending: float


@dataclass(slots=True)
class EgressMeter:
    """Measures one way out.

    Args:
        configured: bytes per second of a good day.
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
        """Bytes per second that it carries now, as far as can be told."""
        return self._capacity

    def observe(self, sent: int, waiting: int, elapsed_s: float, sending: float = 0.0) -> float:
        """Takes a cycle, and says which share of the way was in use, 0..1.

        Args:
            sent: bytes that left in it.
            waiting: bytes that are to leave and have not, at its end.
            elapsed_s: its length, above 0.
            sending: share of it with KV on its way, 0..1, as far as is told.
        """
        before, self._waiting = self._waiting, waiting
        self._last.append(_Cycle(sent, waiting, elapsed_s, sending))
        if before > sent or (self._jam and waiting and before == sent > 0):
            # What waited when the cycle began did not all leave: the way was in use throughout. In
            # a jam that goes for just what waited as well: pieces are counted when they arrive, and
            # of what waits by now some is on its way.
            self._jam.append((sent, elapsed_s))
            # Transfers are counted when they arrive or are reported, so that in a single such cycle
            # nothing may have left: it says nothing of speed.
            if len(self._jam) > 1:
                found = max(self._jam_rate(), MIN_SHARE * self.configured)
                self._capacity = min(found, self.configured)
            return 1.0
        if len(self._jam) > 1:
            # The last of what waited: it was on its way in the cycles before as well.
            self._jam.append((sent, elapsed_s))
            rate = least = self._jam_rate()
        else:
            rate = sent / elapsed_s
            least = rate * RECOVER**elapsed_s
        self._jam.clear()
        recovered = self._capacity * RECOVER**elapsed_s
        self._capacity = min(max(recovered, least), self.configured)
        # In use, but all that waited left: how much more it could carry is not known.
        return 1.0 if self._is_in_use() else min(rate / self._capacity, 1.0)

    def _is_in_use(self) -> bool:
        """Whether KV was on its way as good as throughout the last cycles, all of it for long.

        Workers that begin to send when they have sent leave less than a cycle's worth waiting.
        """
        if len(self._last) < JAM_CYCLES:
            return False
        elapsed_s = sum(each.elapsed_s for each in self._last)
        sending_s = sum(each.sending * each.elapsed_s for each in self._last)
        # Little's law: what is there on average, over what passes, is how long it takes.
        waited = sum(each.waiting * each.elapsed_s for each in self._last)
        sent = sum(each.sent for each in self._last)
        return sending_s > IN_USE * elapsed_s and waited > LONG_S * sent

    def _jam_rate(self) -> float:
        """Bytes per second in the last cycles of the jam."""
        return sum(sent for sent, _ in self._jam) / sum(elapsed for _, elapsed in self._jam)
