"""A link between two workers, as policies see it. Tests: tests/unit/transfer/test_meters.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.types import WorkerId


@dataclass(frozen=True, slots=True)
class LinkView:
    """One sender's measurements of its link to one receiver.

    Attributes:
        channel: kind of channel: local, ipc, shm, nixl or tcp.
        goodput_bytes_s: KV bytes per second while any transfer was in flight; 0 is not known yet.
        rtt_s: smoothed round-trip time in seconds; 0 is not known.
        retransmits: TCP segments retransmitted since start.
        queued_bytes: bytes of transfers that were requested and have not ended.
        transferred_bytes: bytes sent since start.
    """

    peer: WorkerId
    channel: str
    goodput_bytes_s: float = 0.0
    rtt_s: float = 0.0
    retransmits: int = 0
    queued_bytes: int = 0
    transferred_bytes: int = 0

    def estimate_s(self, num_bytes: int) -> float | None:
        """Returns the seconds in which more bytes would arrive; None: no measurement yet."""
        if self.goodput_bytes_s <= 0:
            return None
        return self.rtt_s + (self.queued_bytes + num_bytes) / self.goodput_bytes_s
