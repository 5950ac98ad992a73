"""First signs of a full link: segments sent again, and round trips that grow.

Traffic of others may fill a link before any of our KV waits for it. TCP notices that first.
Source: PrfaaS 3.3 (congestion monitoring: watch loss and retransmission, act before queues build).
Tests: tests/unit/policy/test_congestion.py, tests/integration/test_transfer_weather.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.core.types import WorkerId

SEGMENT_BYTES = 1448
"""Payload of a TCP segment in an Ethernet frame of usual size."""

LOST = 0.005
"""Fraction of segments sent again that is a sign, on a link that usually loses none."""

OVER_USUAL = 4.0
"""Multiple of a link's usual fraction that is a sign: long paths always lose some segments."""

GROWN = 2.0
"""Round trip over the smallest one of the link that is a sign."""

GROWN_S = 0.005
"""Least growth of a round trip that is a sign: short ones vary with the load of the machines."""

KEEP = 0.9
"""Weight of earlier cycles in the usual fraction."""


class LinkName(NamedTuple):
    """One direction between two workers; `incarnation` is the sender's."""

    sender: WorkerId
    incarnation: int
    receiver: WorkerId


class LinkCounts(NamedTuple):
    """A sender's counters of one link.

    Attributes:
        bytes_total: KV bytes that arrived since start.
        retransmits: segments sent again on the open connections.
        rtt_s: smoothed round trip in seconds; 0 is not known.
    """

    bytes_total: int
    retransmits: int
    rtt_s: float


@dataclass(slots=True)
class _Link:
    told: LinkCounts
    least_rtt_s: float
    usual_loss: float = 0.0


class CongestionMeter:
    """Looks for signs on the links out of one cluster."""

    def __init__(self) -> None:
        self._links: dict[LinkName, _Link] = {}

    def observe(self, told: Iterable[tuple[LinkName, LinkCounts]]) -> float | None:
        """Adds the counters of a cycle.

        Returns:
            Fraction of the cycle's bytes that went over links with a sign, 0..1; None if no byte
            arrived.
        """
        before, self._links = self._links, {}
        moved = over_full = 0
        for name, counts in told:
            link = before.get(name)
            if link is None:
                self._links[name] = _Link(counts, counts.rtt_s)
                continue
            self._links[name] = link
            sent = counts.bytes_total - link.told.bytes_total
            if sent > 0:
                moved += sent
                over_full += sent * _has_sign(link, counts, sent)
            link.told = counts
        return over_full / moved if moved else None


def _has_sign(link: _Link, counts: LinkCounts, sent: int) -> bool:
    """Whether the link shows a sign; also updates the link's usual values."""
    # Counters of closed connections are missing.
    again = max(counts.retransmits - link.told.retransmits, 0)
    loss = min(again * SEGMENT_BYTES / sent, 1.0)
    is_losing = loss > max(LOST, OVER_USUAL * link.usual_loss)
    link.usual_loss = KEEP * link.usual_loss + (1 - KEEP) * loss
    if counts.rtt_s > 0:
        link.least_rtt_s = min(link.least_rtt_s or counts.rtt_s, counts.rtt_s)
    is_late = counts.rtt_s > max(GROWN * link.least_rtt_s, link.least_rtt_s + GROWN_S)
    return is_losing or is_late
