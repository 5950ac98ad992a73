"""Limits on the time per token, and what a decode worker can take on while it keeps them.

A request may name the longest mean time per token (TPOT) that it accepts. Two things push a worker
past the limits of those who decode there: a batch so large that its steps take longer than the
strictest limit, and prompts that are computed between the steps. `takes` answers for the first,
`spare_s` for the second; both go by what was measured of the worker's own steps.

The mean counts, not each gap: who got tokens sooner than asked can bear a longer pause now.
Tests: tests/unit/policy/test_token_pace.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.pace import PaceRoom, StepPace

KEPT_SHARE = 0.9
"""A batch is full when its steps would take this much of the strictest limit: contexts grow, and
steps of one length vary."""

PROMPT_SHARE = 0.75
"""No prompt is computed beside a batch whose steps take more of the strictest limit than this."""

FORGET = 0.98
"""Weight of what was known before, at each step that is measured."""

CONTEXT_VARIATION = 0.1
"""Where contexts have varied less than this share of their mean, a slope through them says little:
it is drawn towards none."""

LIFE_TOKENS = 128.0
"""Tokens that an answer is taken to have before any has ended."""

LIFE_FORGET = 0.98

OLD_SHARE = 0.25
"""Who has got more tokens than answers have as a rule is taken to get this share of that more."""


class StepFit:
    """Fits `StepPace` to the steps of a worker, the last ones most: least squares that forget."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, context_tokens: float, seconds: float, num_steps: int = 1) -> None:
        """Takes steps that decoded only, all of about the same context."""
        kept = FORGET**num_steps
        new = (1.0 - kept) / (1.0 - FORGET)
        self._weight = kept * self._weight + new
        self._x = kept * self._x + new * context_tokens
        self._y = kept * self._y + new * seconds
        self._xx = kept * self._xx + new * context_tokens**2
        self._xy = kept * self._xy + new * context_tokens * seconds

    def pace(self) -> StepPace:
        """What is known now."""
        if not self._weight:
            return StepPace()
        x, y = self._x / self._weight, self._y / self._weight
        variance = max(self._xx / self._weight - x * x, 0.0)
        covariance = self._xy / self._weight - x * y
        damped = variance + (CONTEXT_VARIATION * x) ** 2
        slope = min(max(covariance / damped if damped else 0.0, 0.0), y / x if x else 0.0)
        return StepPace(y - slope * x, slope)


class AnswerLength:
    """Mean tokens of the answers that ended of late."""

    def __init__(self) -> None:
        self.tokens = LIFE_TOKENS

    def add(self, num_tokens: int) -> None:
        """An answer ended."""
        self.tokens += (1.0 - LIFE_FORGET) * (num_tokens - self.tokens)


@dataclass(frozen=True, slots=True)
class Paced:
    """A sequence that decodes under a limit.

    Attributes:
        limit_s: longest mean time per token.
        num_tokens: that it got after its first one.
        elapsed_s: since its first token.
    """

    limit_s: float
    num_tokens: int
    elapsed_s: float


def takes(room: PaceRoom, limit_s: float, num_tokens: int) -> bool:
    """Whether one more sequence leaves every limit kept, its own included.

    A worker on which nobody decodes takes it in any case: nowhere would it be faster.

    Args:
        limit_s: of the new one; infinite for none.
        num_tokens: of its context.
    """
    strictest = min(room.strictest_s, limit_s)
    if math.isinf(strictest) or not room.context_tokens:
        return True
    return room.pace.of(room.context_tokens + num_tokens) <= KEPT_SHARE * strictest


def spare_s(sequences: Iterable[Paced], step_s: float, answer_tokens: float) -> float:
    """Seconds that all steps may be held up before the first of these limits is missed; below zero
    it will be missed anyhow.

    Args:
        step_s: of the decode steps to come.
        answer_tokens: that an answer has as a rule.
    """
    spare = math.inf
    for each in sequences:
        to_come = max(answer_tokens - each.num_tokens, OLD_SHARE * answer_tokens)
        gained = each.limit_s * each.num_tokens - each.elapsed_s
        spare = min(spare, gained + (each.limit_s - step_s) * to_come)
    return spare


def bears(room: PaceRoom, prompts_s: float) -> bool:
    """Whether all who decode there keep their limits although prompts are computed between their
    steps.

    Args:
        prompts_s: seconds that the prompts take, those included that the worker has accepted.
    """
    return time_used(room) <= PROMPT_SHARE and prompts_s <= room.spare_s


def time_used(room: PaceRoom) -> float:
    """Share of the strictest limit that a decode step takes; 0 where nobody has one."""
    if math.isinf(room.strictest_s):
        return 0.0
    return room.pace.of(room.context_tokens) / room.strictest_s
