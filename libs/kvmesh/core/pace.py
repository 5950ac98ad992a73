"""How fast a worker's decode steps are, and what it can take of requests with limits on that.

`kvmesh.policy.token_pace` decides by it. Tests: tests/unit/policy/test_token_pace.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmesh.core.values import quick

NO_LIMIT_S = math.inf
"""Of a request that accepts any time per token."""


@dataclass(frozen=True, slots=True)
class StepPace:
    """Seconds of a decode step: `constant_s + token_s * tokens of context`; zeros: not known."""

    constant_s: float = 0.0
    token_s: float = 0.0

    def of(self, context_tokens: float) -> float:
        """Seconds of a step whose sequences have so many tokens together."""
        return self.constant_s + self.token_s * context_tokens


@dataclass(frozen=True, slots=True)
class PaceRoom:
    """What a decode worker has to offer to those with limits.

    Attributes:
        pace: of its decode steps.
        context_tokens: of all sequences here, those included whose KV is awaited.
        strictest_s: limit of the strictest of them; infinite: none has one.
        spare_s: seconds of computing prompts for which hardly any of them is expected to miss its
            limit.
    """

    pace: StepPace = StepPace()
    context_tokens: int = 0
    strictest_s: float = math.inf
    spare_s: float = math.inf


# As in `core/types.py`: every load that a worker reports has one of each.
for _often_made in (StepPace, PaceRoom):
    quick(_often_made)
