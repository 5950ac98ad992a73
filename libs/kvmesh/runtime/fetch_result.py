"""Options of prefix fetches, and the result of a fetch.

Tests: tests/contract/test_prefix_reader.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FetchOutcome(enum.Enum):
    """Outcome of a fetch."""

    FETCHED = "fetched"
    HELD = "held"
    """No block was missing, or the holder has no more than this worker."""
    SHARED = "shared"
    """Another request's fetch brought the blocks, or all that the holder gives."""
    NO_ROOM = "no_room"
    """This worker has too few free blocks."""
    REFUSED = "refused"
    LOST = "lost"
    """The holder is gone, stalled, or sent an impossible answer."""
    TIMEOUT = "timeout"
    SHUNNED = "shunned"
    """The holder was lost a moment ago and is not asked."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a fetch.

    Attributes:
        num_blocks: number of leading blocks that are here now, including those from before.
        num_fetched: number of these that this fetch brought from the holder.
        num_bytes: bytes read.
        reason: the refusal's reason, one word.
    """

    outcome: FetchOutcome
    num_blocks: int
    num_fetched: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Time limits of a worker's fetches, in seconds.

    Attributes:
        timeout_s: limit of a whole fetch; afterwards the rest is computed.
        lease_timeout_s: limit of the holder's answer to a lease.
    """

    timeout_s: float = 10.0
    lease_timeout_s: float = 2.0
