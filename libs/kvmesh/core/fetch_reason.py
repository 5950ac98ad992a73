"""Reasons for and against a fetch of KV from another worker, one word each."""

from __future__ import annotations

import enum


class FetchReason(enum.Enum):
    """The reason for which a candidate fetches a prefix, or does not."""

    NOBODY = "nobody"
    """No worker is known to hold a part of the prompt."""
    HELD = "held"
    """No worker holds more than the candidate itself."""
    SHORT = "short"
    """The missing part is too short: it is computed before a request for it could be sent."""
    SLOW = "slow"
    """The missing part is computed before its KV would arrive."""
    LOAD = "load"
    """The part missing in its pool is in its own tiers, and no other worker delivers it
    faster."""
    FETCH = "fetch"
    """The missing part's KV arrives before it would be computed."""
    ASK = "ask"
    """The decode worker holds the missing part, and querying it there is faster than a fetch."""
    CHAIN = "chain"
    """Other workers compute the beginning of the missing part at the same time."""
