"""The result of a joint decision for one of its requests.

Tests: tests/unit/policy/test_joint.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.policy.elastic import ElasticReason

JOINT_WINDOW_S = 0.02
"""Seconds that a request waits for others while no worker would begin its prompt."""


class JointRule(enum.Enum):
    """Rule by which a joint decision divides prompts among workers; operators see the value."""

    FIRST_TOKEN = "first_token"
    """Least sum of the times to first token; a fetched prefix counts with its cost."""
    VOLUME = "volume"
    """TokenLake's: batches and their numbers of workers by the dynamic program of 6.2, then the
    least KV moved (section 5)."""


class JointReason(enum.Enum):
    """The effect of a joint decision on one of its requests."""

    ALONE = "alone"
    """No other request arrived at the time."""
    FIXED = "fixed"
    """It had only one place to go."""
    KEPT = "kept"
    """It goes to the worker that it would get if decided alone."""
    MOVED = "moved"
    """It goes to another worker than if decided alone, because that is better for all requests."""


@dataclass(frozen=True, slots=True)
class JointChoice:
    """One request's part in a decision about several.

    Attributes:
        num_asked: number of requests decided together, this one included.
        turn: number of their prompts that the same worker computes before this one.
        saved_tokens: computed tokens saved until all their first tokens, compared with deciding one
            by one; the same number for each request.
        brought_tokens: tokens of this prompt that are fetched from another worker's cache.
        num_batched: number of prompts in its batch (TokenLake 6.2), this one included; 0: the rule
            forms no batches.
        degree: number of workers that compute its batch.
        elastic: reason of the division into batches; None: the rule forms none.
    """

    reason: JointReason
    num_asked: int = 1
    turn: int = 0
    saved_tokens: float = 0.0
    brought_tokens: int = 0
    num_batched: int = 0
    degree: int = 1
    elastic: ElasticReason | None = None


ALONE = JointChoice(JointReason.ALONE)
