"""The speed of a worker's decode steps, and its room for requests with a TPOT limit.

`kvmesh.policy.token_pace` decides by these values. Tests: tests/unit/policy/test_token_pace.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmesh.core.values import quick

NO_LIMIT_S = math.inf
"""TPOT limit of a request that accepts any time per token, in seconds."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """Seconds of a decode step: `constant_s + token_s * context tokens`; both 0: not known."""

    constant_s: float = 0.0
    token_s: float = 0.0

    def of(self, context_tokens: float) -> float:
        """Returns the seconds of a step, given the context tokens of all its sequences in total."""
        return self.constant_s + self.token_s * context_tokens


@dataclass(frozen=True, slots=True)
class PaceRoom:
    """A decode worker's room under the TPOT limits of its sequences.

    Attributes:
        pace: speed of its decode steps.
        context_tokens: total context of its sequences, including those whose KV has not arrived.
        strictest_s: smallest TPOT limit of these; infinite if none has a limit.
        spare_s: seconds of prefill that it can add before more than a few of these are expected to
            miss their limits (`token_pace.BEARABLE_MISSES`).
    """

    pace: StepPace = StepPace()
    context_tokens: int = 0
    strictest_s: float = math.inf
    spare_s: float = math.inf


# For speed, as in `core/types.py`: every load that a worker reports contains one of each.
for _often_made in (StepPace, PaceRoom):
    quick(_often_made)
