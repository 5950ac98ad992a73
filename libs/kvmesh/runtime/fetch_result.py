"""How a worker fetches prefixes, and what a fetch came to.

Tests: tests/contract/test_prefix_reader.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FetchOutcome(enum.Enum):
    """How a fetch ended."""

    FETCHED = "fetched"
    HELD = "held"
    """Nothing was missing, or the holder has no more than this worker."""
    SHARED = "shared"
    """Another request's fetch brought it, or as much of it as the holder gives."""
    NO_ROOM = "no_room"
    """This worker has too few free blocks."""
    REFUSED = "refused"
    LOST = "lost"
    """The holder is gone, stalled, or says what cannot be."""
    TIMEOUT = "timeout"
    SHUNNED = "shunned"
    """The holder was lost a moment ago and is not asked."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What a fetch came to.

    Attributes:
        num_blocks: leading blocks that are here now, those that were here before included.
        num_fetched: of these, block indices that this fetch brought from the holder.
        num_bytes: that were read.
        reason: of a refusal, in a word.
    """

    outcome: FetchOutcome
    num_blocks: int
    num_fetched: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """How a worker fetches.

    Attributes:
        timeout_s: for a whole fetch; then the rest is computed.
        lease_timeout_s: for the holder's answer to a lease.
    """

    timeout_s: float = 10.0
    lease_timeout_s: float = 2.0
