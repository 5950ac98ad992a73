"""Why routes let workers bring KV from others, in one word."""

from __future__ import annotations

import enum


class FetchReason(enum.Enum):
    """Why a candidate fetches a prefix, or does not."""

    NOBODY = "nobody"
    """Nobody holds any of the prompt, or nobody knows."""
    HELD = "held"
    """Nobody holds more than the candidate itself."""
    SHORT = "short"
    """What it lacks is computed before it could be asked for."""
    SLOW = "slow"
    """What it lacks is computed before it would be here."""
    LOAD = "load"
    """What it lacks in its pool lies in its own tiers, and nobody has it here sooner."""
    FETCH = "fetch"
    """What it lacks is here before it would be computed."""
    ASK = "ask"
    """What it lacks is with the worker that is to decode, and is asked for there sooner still."""
    CHAIN = "chain"
    """Other workers compute the beginning of what it lacks at the same time."""
