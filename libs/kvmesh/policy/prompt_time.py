"""Measured time to compute a prompt on this worker, to compare with bringing its KV from elsewhere.

A step has a constant cost, whatever it computes. A mean of seconds per token would count it as if
it grew with the prompt: after turns of a few tokens, computing a long prefix would look many times
slower than it is, and a copy on a slow disk would be read instead. So a line is fitted: constant
seconds per step, and seconds per token.
Tests: tests/unit/policy/test_prompt_time.py.
"""

from __future__ import annotations

FORGET = 0.98
"""Factor on the weight of all earlier steps at each measured step (exponential forgetting)."""

ORIGIN_WEIGHT = 0.1
"""Weight, in steps, of the assumption that a step has no constant cost. It decides while all steps
are of one size, which tells nothing of how their time divides."""


class PromptTime:
    """Fits the time of steps to the number of their prompt tokens, by least squares.

    Args:
        max_step_tokens: most tokens of one step.
    """

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds one step.

        Args:
            num_tokens: prompt tokens that it computed, at least one.
            seconds: its time beyond that of a step that only decodes.
        """
        self._weight = FORGET * self._weight + 1.0
        self._x = FORGET * self._x + num_tokens
        self._y = FORGET * self._y + seconds
        self._xx = FORGET * self._xx + num_tokens * num_tokens
        self._xy = FORGET * self._xy + num_tokens * seconds

    def of(self, num_tokens: int) -> float:
        """Returns the estimated seconds to compute so many tokens; 0 before the first step."""
        step_s, token_s = self._line()
        num_steps = -(-num_tokens // self._max_step_tokens)
        return num_steps * step_s + num_tokens * token_s

    def _line(self) -> tuple[float, float]:
        """Seconds of a step, and of a token; neither is negative."""
        if not self._weight:
            return 0.0, 0.0
        weight = self._weight + ORIGIN_WEIGHT
        scale = weight * self._xx - self._x * self._x
        step_s = (self._xx * self._y - self._x * self._xy) / scale
        token_s = (weight * self._xy - self._x * self._y) / scale
        if step_s < 0.0:
            return 0.0, self._xy / self._xx
        if token_s < 0.0:
            return 0.0, self._y / self._x
        return step_s, token_s
