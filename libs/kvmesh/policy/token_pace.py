"""TPOT limits of requests, and the load that a decode worker can accept while it keeps them.

A request may name the longest mean time per token (TPOT) that it accepts. Two things push a decode
worker past its sequences' limits: a batch so large that its steps take longer than the strictest
limit, and prompts computed between the steps. `takes` checks the first, `spare_s` the second. Both
use the measured step times of that worker.

The mean counts, not each gap. A sequence that got its tokens sooner than its limit requires can
bear a longer pause now. Any other makes up for a pause with later tokens, unless its answer ends
before.
Tests: tests/unit/policy/test_token_pace.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kvmesh.core.pace import PaceRoom, StepPace

KEPT_SHARE = 0.9
"""Fraction of the strictest limit that a full batch's steps take: contexts grow, and steps of one
length vary."""

PROMPT_SHARE = 0.75
"""Largest fraction of the strictest limit that a batch's steps may take for a prompt to be computed
beside it."""

FORGET = 0.98
"""Factor on the weight of all earlier steps at each measured step (exponential forgetting)."""

CONTEXT_VARIATION = 0.1
"""Regularisation of the fitted slope, as a fraction of the mean context. Contexts that varied less
than this say little about the slope, so it shrinks towards 0."""

SEEN_TOKENS = 4096.0
"""Regularisation of the fitted slope, in context tokens. Over contexts of tens of tokens, steps
differ by their noise and by the number of sequences, and a line through them tells nothing of a
long prompt. A prompt is then taken, and its own steps are the measurement."""

LIFE_TOKENS = 128.0
"""Assumed number of tokens of an answer before any answer has ended."""

LIFE_FORGET = 0.98
"""Weight of the earlier mean answer length when an answer ends."""

BEARABLE_MISSES = 0.1
"""Expected number of TPOT limits missed that is acceptable for prompts computed beside decode. The
gain is small: at most one request elsewhere keeps its TTFT limit, mostly none, and the help makes
other requests later."""

TOO_SLOW_S = 1e-3
"""Seconds of delay that a sequence makes up for over its answer, where steps take longer than its
limit: it makes up for nothing, and `spare_s` divides by this instead of 0."""


class StepFit:
    """Fits `StepPace` to a worker's steps by least squares with exponential forgetting."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, context_tokens: float, seconds: float) -> None:
        """Adds one step that only decoded."""
        self._weight = FORGET * self._weight + 1.0
        self._x = FORGET * self._x + context_tokens
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + context_tokens * context_tokens
        self._xy = FORGET * self._xy + context_tokens * seconds

    def add_run(
        self, num_steps: int, first: tuple[float, float], growth: tuple[float, float]
    ) -> None:
        """Adds consecutive steps of one batch, with the same result as `add` for each.

        Args:
            first: context tokens and seconds of the first step.
            growth: increase of both from one step to the next.
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
        """Returns the current fit; all 0 before any step."""
        if not self._weight:
            return StepPace()
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        damped = (CONTEXT_VARIATION * x) ** 2 + SEEN_TOKENS * SEEN_TOKENS
        if variance > 0.0:
            damped += variance
        covariance = self._xy / self._weight - x * y
        if covariance <= 0.0:
            return StepPace(y, 0.0)
        slope = min(covariance / damped, y / x)
        return StepPace(y - slope * x, slope)


class AnswerLength:
    """Moving mean of the number of tokens of ended answers."""

    def __init__(self) -> None:
        self.tokens = LIFE_TOKENS

    def add(self, num_tokens: int) -> None:
        """Adds the length of an answer that ended."""
        self.tokens += (1.0 - LIFE_FORGET) * (num_tokens - self.tokens)


Paced = tuple[float, int, float]
"""A decoding sequence with a TPOT limit: the limit in seconds, the number of tokens after its first
one, and the seconds since that one. A tuple, because each report makes one per sequence."""


def takes(room: PaceRoom, limit_s: float, num_tokens: int) -> bool:
    """Whether all limits are kept with one more sequence, its own included.

    A worker that decodes nothing takes any sequence: no other worker would be faster.

    Args:
        limit_s: TPOT limit of the new sequence; infinite for none.
        num_tokens: context length of the new sequence.
    """
    if not room.context_tokens:
        return True
    strictest = room.strictest_s
    strictest = min(strictest, limit_s)
    if strictest == math.inf:
        return True
    return room.pace.of(room.context_tokens + num_tokens) <= KEPT_SHARE * strictest


def spare_s(sequences: Iterable[Paced], step_s: float, answer_tokens: float) -> float:
    """Returns the longest delay of all steps with at most `BEARABLE_MISSES` expected missed limits.

    In seconds; infinite if no sequence has a limit. Each further token makes up for
    `limit - step_s` of a delay. How many tokens follow is unknown. The chance that an answer ends
    within the tokens that it needs to catch up is taken as their number over the mean length, from
    the first late token on.

    Args:
        step_s: seconds of a decode step to come.
        answer_tokens: mean number of tokens of an answer.
    """
    growths: list[tuple[float, float]] = []
    for limit_s, num_tokens, elapsed_s in sequences:
        gained_s = limit_s * num_tokens - elapsed_s
        made_up_s = (limit_s - step_s) * answer_tokens
        if made_up_s <= 0.0:
            # It cannot catch up: any delay beyond its slack misses the limit.
            made_up_s = TOO_SLOW_S
        elif gained_s < -made_up_s:
            continue  # its limit is missed in any case
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
    """Whether the sequences that decode there keep their limits although prompts run in between.

    Args:
        prompts_s: seconds that the prompts take, including those accepted before.
        misses: expected number of missed limits that is acceptable.
    """
    if math.isinf(room.spare_s):
        return time_used(room) <= PROMPT_SHARE
    return time_used(room) <= PROMPT_SHARE and prompts_s <= room.spare_s * misses / BEARABLE_MISSES


def time_used(room: PaceRoom) -> float:
    """Returns the fraction of the strictest limit that a decode step takes; 0 without a limit."""
    if math.isinf(room.strictest_s):
        return 0.0
    return room.pace.of(room.context_tokens) / room.strictest_s


def context_share(room: PaceRoom) -> float:
    """Returns the used fraction of the context tokens that fit the worker's strictest limit.

    0 if no sequence has a limit or no step was measured.
    """
    if math.isinf(room.strictest_s) or not room.pace.token_s:
        return 0.0
    left_s = KEPT_SHARE * room.strictest_s - room.pace.constant_s
    used_s = room.pace.token_s * room.context_tokens
    return used_s / left_s if left_s > used_s else 1.0
