"""What a decision about several requests at once says of one of them.

Tests: tests/unit/policy/test_joint.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

JOINT_WINDOW_S = 0.02
"""How long a request waits for others while no worker would begin its prompt."""


class JointRule(enum.Enum):
    """What requests that are decided together are divided by; operators see the value."""

    FIRST_TOKEN = "first_token"
    """The least sum of the times to their first tokens; what travels counts as what it takes."""
    VOLUME = "volume"
    """TokenLake 5 and 6.2: prompts that share a worker by its program, then the least KV moved."""


class JointReason(enum.Enum):
    """What became of a request among those that it was decided with."""

    ALONE = "alone"
    """Nobody else asked at the time."""
    FIXED = "fixed"
    """It had one place to go, whatever the others do."""
    KEPT = "kept"
    """It goes where it would have gone by itself."""
    MOVED = "moved"
    """It goes to another worker than by itself, because that is better for all of them."""


@dataclass(frozen=True, slots=True)
class JointChoice:
    """One request's part in a decision about several.

    Attributes:
        num_asked: requests that were decided together, this one included.
        turn: prompts of them that the same worker computes before this one.
        saved_tokens: by which the first tokens of all of them together come sooner than one by
            one; the same number for each.
        brought_tokens: of this prompt, that come from another worker's cache.
    """

    reason: JointReason
    num_asked: int = 1
    turn: int = 0
    saved_tokens: float = 0.0
    brought_tokens: int = 0


ALONE = JointChoice(JointReason.ALONE)
