"""Limits on the time per token, and what a decode worker can take on while it keeps them.

A request may name the longest mean time per token (TPOT) that it accepts. Two things push a worker
past the limits of those who decode there: a batch so large that its steps take longer than the
strictest limit, and prompts that are computed between the steps. `takes` answers for the first,
`spare_s` for the second; both go by what was measured of the worker's own steps.

The mean counts, not each gap: who got tokens sooner than asked can bear a longer pause now. Who has
gained too little makes up for a pause with the tokens to come, unless the answer ends before.
Tests: tests/unit/policy/test_token_pace.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

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

BEARABLE_MISSES = 0.1
"""So many limits may be expected to be missed for the prompts that are computed beside decode. That
a request misses its first token elsewhere is one at most, and mostly it would not: who helps also
has others come later."""

TOO_SLOW_S = 1e-3
"""In place of what somebody makes up for whose steps take longer than its limit."""


class StepFit:
    """Fits `StepPace` to the steps of a worker, the last ones most: least squares that forget."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, context_tokens: float, seconds: float) -> None:
        """Takes a step that decoded only."""
        self._weight = FORGET * self._weight + 1.0
        self._x = FORGET * self._x + context_tokens
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + context_tokens * context_tokens
        self._xy = FORGET * self._xy + context_tokens * seconds

    def add_run(
        self, num_steps: int, first: tuple[float, float], growth: tuple[float, float]
    ) -> None:
        """As `add` for steps of one batch, one after the other.

        Args:
            first: context and seconds of the first one.
            growth: by which each had more than the one before.
        """
        if num_steps == 1:
            self.add(first[0], first[1])
            return
        count, left = float(num_steps), 1.0 - FORGET
        kept = math.pow(FORGET, count)
        # Sums of j**0, j**1 and j**2 times FORGET**j, where the last step's j is 0.
        ones = (1.0 - kept) / left
        firsts = (FORGET * ones - count * kept) / left
        squares = (FORGET * (2.0 * firsts + ones) - count * count * kept) / left
        more_x, more_y = growth
        x, y = first[0] + (count - 1.0) * more_x, first[1] + (count - 1.0) * more_y
        self._weight = kept * self._weight + ones
        self._x = kept * self._x + x * ones - more_x * firsts
        self._y = kept * self._y + y * ones - more_y * firsts
        self._xx = (
            kept * self._xx + x * x * ones - 2.0 * x * more_x * firsts + more_x * more_x * squares
        )
        self._xy = (
            kept * self._xy
            + x * y * ones
            - (x * more_y + y * more_x) * firsts
            + more_x * more_y * squares
        )

    def pace(self) -> StepPace:
        """What is known now."""
        if not self._weight:
            return StepPace()
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        damped = (CONTEXT_VARIATION * x) ** 2
        if variance > 0.0:
            damped += variance
        covariance = self._xy / self._weight - x * y
        if covariance <= 0.0 or damped <= 0.0:
            return StepPace(y, 0.0)
        slope, steepest = covariance / damped, y / x if x else 0.0
        slope = min(slope, steepest)
        return StepPace(y - slope * x, slope)


class AnswerLength:
    """Mean tokens of the answers that ended of late."""

    def __init__(self) -> None:
        self.tokens = LIFE_TOKENS

    def add(self, num_tokens: int) -> None:
        """An answer ended."""
        self.tokens += (1.0 - LIFE_FORGET) * (num_tokens - self.tokens)


Paced = tuple[float, int, float]
"""A sequence that decodes under a limit: its longest mean time per token in seconds, tokens that it
got after its first one, and seconds since that one. Each report makes one for every sequence."""


def takes(room: PaceRoom, limit_s: float, num_tokens: int) -> bool:
    """Whether one more sequence leaves every limit kept, its own included.

    A worker on which nobody decodes takes it in any case: nowhere would it be faster.

    Args:
        limit_s: of the new one; infinite for none.
        num_tokens: of its context.
    """
    if not room.context_tokens:
        return True
    strictest = room.strictest_s
    strictest = min(strictest, limit_s)
    if strictest == math.inf:
        return True
    return room.pace.of(room.context_tokens + num_tokens) <= KEPT_SHARE * strictest


def spare_s(sequences: Iterable[Paced], step_s: float, answer_tokens: float) -> float:
    """Seconds that all steps may be held up until so many of these limits as `BEARABLE_MISSES` are
    expected to be missed for it; infinite where nobody has a limit.

    Each further token makes up for `limit - step_s` of a delay. Nobody knows how many come, and
    answers of all lengths end: the chance that one ends within the tokens that it needs for that is
    taken to be their number over the mean length, from the first one late on.

    Args:
        step_s: of the decode steps to come.
        answer_tokens: that an answer has as a rule.
    """
    growths: list[tuple[float, float]] = []
    for limit_s, num_tokens, elapsed_s in sequences:
        gained_s = limit_s * num_tokens - elapsed_s
        made_up_s = (limit_s - step_s) * answer_tokens
        if made_up_s <= 0.0:
            # It makes up for nothing: whatever it has not gained by now is missed.
            made_up_s = TOO_SLOW_S
        elif gained_s < -made_up_s:
            continue  # it is missed anyhow
        growths.append((max(gained_s, 0.0), 1.0 / made_up_s))
    growths.sort()
    begin, growth, left = 0.0, 0.0, BEARABLE_MISSES
    for gained_s, share in growths:
        if growth and (gained_s - begin) * growth >= left:
            break
        left -= (gained_s - begin) * growth
        begin = gained_s
        growth += share
    return begin + left / growth if growth else math.inf


def bears(room: PaceRoom, prompts_s: float, misses: float = BEARABLE_MISSES) -> bool:
    """Whether all who decode there keep their limits, but for so many as are expected to miss them,
    although prompts are computed between their steps.

    Args:
        prompts_s: seconds that the prompts take, those included that the worker has accepted.
    """
    if math.isinf(room.spare_s):
        return time_used(room) <= PROMPT_SHARE
    return time_used(room) <= PROMPT_SHARE and prompts_s <= room.spare_s * misses / BEARABLE_MISSES


def time_used(room: PaceRoom) -> float:
    """Share of the strictest limit that a decode step takes; 0 where nobody has one."""
    if math.isinf(room.strictest_s):
        return 0.0
    return room.pace.of(room.context_tokens) / room.strictest_s


def context_share(room: PaceRoom) -> float:
    """Share of the tokens of context that a worker takes under its strictest limit; 0 where nobody
    has one or nothing is known of its steps.
    """
    if math.isinf(room.strictest_s) or not room.pace.token_s:
        return 0.0
    left_s = KEPT_SHARE * room.strictest_s - room.pace.constant_s
    used_s = room.pace.token_s * room.context_tokens
    return used_s / left_s if left_s > used_s else 1.0
