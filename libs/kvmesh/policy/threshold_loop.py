"""PrfaaS's short-term loop: measures the offload cluster's egress link and adjusts the threshold.
The scheduler and the simulator both use it.

Its owner measures once per `role_loop.CYCLE_S`. Source: PrfaaS 3.4.3 point 2.
Tests: tests/unit/policy/test_threshold_loop.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.policy.egress import EgressMeter
from kvmesh.policy.offload import AdjustLimits, LinkState, Threshold, adjust_threshold

_LIMITS = AdjustLimits()

SIGN_CYCLES = 2
"""Number of cycles in a row with signs on most bytes that count as a full link."""

SLOW = 0.7
"""Fraction of the configured bandwidth, while KV is in flight, below which signs count. A burst of
our own that fills the link for a moment shows them too, at its full speed.
"""


@dataclass(frozen=True, slots=True)
class ThresholdReading:
    """Measurements of one cycle.

    Attributes:
        sent_bytes: bytes that left the offload cluster in the cycle.
        leaving_bytes: bytes that wait to leave it at the end of the cycle.
        remote_waiting, local_waiting: requests that wait for prefill in each cluster.
        num_remote, num_local: instances that prefill in each cluster.
        sending: fraction of the cycle with KV in flight out of the offload cluster, 0..1.
        with_signs: fraction of the sent bytes on links with first signs of a full link, see
            `congestion.py`; None if nothing was sent.
    """

    sent_bytes: int
    leaving_bytes: int
    remote_waiting: float
    local_waiting: float
    num_remote: int
    num_local: int
    sending: float = 0.0
    with_signs: float | None = None


class ThresholdLoop:
    """The threshold of one model.

    Args:
        start: threshold in force until the first cycle.
        egress_bytes_per_s: bandwidth of the egress link on a good day; above 0.

    Attributes:
        threshold: in force now; the slow loop (`allocation_loop.py`) replaces it.
    """

    def __init__(self, start: Threshold, egress_bytes_per_s: float) -> None:
        self.threshold = start
        self._way_out = EgressMeter(egress_bytes_per_s)
        self._num_signs = 0
        self._capacity_sum = 0.0
        self._num_cycles = 0
        self._utilisation = 1.0  # until it is measured

    @property
    def has_room(self) -> bool:
        """Whether the egress link clearly had room in the last cycle; False before the first."""
        return self._utilisation < _LIMITS.low_utilisation

    @property
    def capacity(self) -> float:
        """Estimated bytes per second that the egress link carries now."""
        return self._way_out.capacity

    def cycle(self, reading: ThresholdReading, elapsed_s: float) -> bool:
        """Adjusts the threshold; returns whether it changed.

        Args:
            elapsed_s: seconds since the last cycle, above 0.
        """
        self._utilisation = self._way_out.observe(
            reading.sent_bytes, reading.leaving_bytes, elapsed_s, reading.sending
        )
        if self._has_signs(reading, elapsed_s):
            self._utilisation = 1.0
        self._capacity_sum += self._way_out.capacity
        self._num_cycles += 1
        before = self.threshold
        self.threshold = adjust_threshold(
            before,
            LinkState(
                self._utilisation,
                reading.remote_waiting / max(reading.num_remote, 1),
                reading.local_waiting / max(reading.num_local, 1),
            ),
            _LIMITS,
        )
        return self.threshold.tokens != before.tokens

    def _has_signs(self, reading: ThresholdReading, elapsed_s: float) -> bool:
        """Whether TCP shows that the link is full, although little of our KV may wait."""
        if not reading.sent_bytes and not reading.leaving_bytes:
            self._num_signs = 0
        elif reading.with_signs is not None:
            full_speed = self._way_out.configured * reading.sending * elapsed_s
            is_slow = reading.sent_bytes < SLOW * full_speed
            self._num_signs = self._num_signs + 1 if is_slow and reading.with_signs > 0.5 else 0
        return self._num_signs >= SIGN_CYCLES

    def take_capacity(self) -> float:
        """Returns the mean capacity of the egress link since the last call, in bytes per second.

        The capacity at one moment says too little for a plan of minutes.
        """
        if not self._num_cycles:
            return self._way_out.capacity
        mean = self._capacity_sum / self._num_cycles
        self._capacity_sum, self._num_cycles = 0.0, 0
        return mean
