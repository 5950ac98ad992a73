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


@dataclass(frozen=True, slots=True)
class ThresholdReading:
    """Measurements of one cycle.

    Attributes:
        sent_bytes: bytes that left the offload cluster in the cycle.
        leaving_bytes: bytes that wait to leave it at the end of the cycle.
        remote_waiting, local_waiting: requests that wait for prefill in each cluster.
        num_remote, num_local: instances that prefill in each cluster.
        sending: fraction of the cycle with KV in flight out of the offload cluster, 0..1.
    """

    sent_bytes: int
    leaving_bytes: int
    remote_waiting: float
    local_waiting: float
    num_remote: int
    num_local: int
    sending: float = 0.0


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

    def take_capacity(self) -> float:
        """Returns the mean capacity of the egress link since the last call, in bytes per second.

        The capacity at one moment says too little for a plan of minutes.
        """
        if not self._num_cycles:
            return self._way_out.capacity
        mean = self._capacity_sum / self._num_cycles
        self._capacity_sum, self._num_cycles = 0.0, 0
        return mean
