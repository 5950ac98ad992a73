"""A link between two workers, as policies see it. Tests: tests/unit/transfer/test_meters.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.types import WorkerId


@dataclass(frozen=True, slots=True)
class LinkView:
    """What one sender knows of its way to one receiver.

    Attributes:
        channel: kind of channel: local, ipc, shm, nixl or tcp.
        goodput_bytes_s: KV bytes per second while something was under way; 0 is not known yet.
        rtt_s: smoothed round trip; 0 is not known.
        retransmits: TCP segments sent again since start.
        queued_bytes: asked for and not answered yet.
        transferred_bytes: since start.
    """

    peer: WorkerId
    channel: str
    goodput_bytes_s: float = 0.0
    rtt_s: float = 0.0
    retransmits: int = 0
    queued_bytes: int = 0
    transferred_bytes: int = 0

    def estimate_s(self, num_bytes: int) -> float | None:
        """Seconds until so many more bytes would be there; None while the link is unknown."""
        if self.goodput_bytes_s <= 0:
            return None
        return self.rtt_s + (self.queued_bytes + num_bytes) / self.goodput_bytes_s
