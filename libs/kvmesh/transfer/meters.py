"""Counts of what channels carried. Tests: tests/integration/test_transfer.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.types import WorkerId


@dataclass(slots=True)
class PeerMeter:
    """Totals of all channels with one peer, since start.

    Attributes:
        bytes: KV bytes that arrived in their blocks.
        calls: PUT frames that were answered with yes.
        seconds: wall time of successful transfers, first byte to answer; those of concurrent
            transfers add up.
        refused: transfers and commits that the receiver refused.
        lost: transfers and commits that ended with their channel.
        late: answers that came after the sender had given up.
        channels: channels that were opened.
    """

    bytes: int = 0
    calls: int = 0
    seconds: float = 0.0
    commits: int = 0
    refused: int = 0
    lost: int = 0
    late: int = 0
    channels: int = 0


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """State of one side of the data plane.

    Attributes:
        open_channels: connections that are up.
        peers: totals by worker; the live meters, not to be written.
    """

    open_channels: int
    peers: Mapping[WorkerId, PeerMeter]
