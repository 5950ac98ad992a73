"""Limits the prompt tokens of a step beside decode, for requests with a limit on the gap of tokens.

A step that computes a part of a prompt delays the next token of every sequence that decodes in it.
A request may name the longest time between two of its tokens (inter-token latency, ITL). The prompt
is then cut into parts that fit: the strictest limit, less the time of the decode step, divided by
the measured time per prompt token. Sarathi-Serve (OSDI 2024, section 4.2) fixes this budget per
deployment; here it follows the requests. Tests: tests/unit/policy/test_mixed_step.py.
"""

from __future__ import annotations

import math

KEPT_SHARE = 0.9
"""Fraction of the limit that a step may take: steps of one size vary."""

MIN_TOKENS = 16
"""Minimum number of prompt tokens in a step, so that a started prompt always makes progress."""

FORGET = 0.9
"""Weight of the earlier measurements when a step is added."""


class MixedSteps:
    """Measures steps that compute prompts and bounds the next one.

    The time per prompt token includes the fixed costs of a step. Smaller parts therefore raise it,
    and the bound settles where the whole step takes `KEPT_SHARE` of the limit.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Adds a step.

        Args:
            num_tokens: prompt tokens of the step.
            seconds: time of the step beyond a step that only decodes.
        """
        self._tokens = FORGET * self._tokens + num_tokens
        self._seconds = FORGET * self._seconds + max(seconds, 0.0)

    @property
    def token_s(self) -> float:
        """Seconds per prompt token; 0 before the first measurement."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def most_tokens(self, limit_s: float, decode_s: float) -> int | None:
        """Returns the largest number of prompt tokens for the next step.

        Args:
            limit_s: strictest limit on the time between two tokens among the sequences that decode;
                infinite for none.
            decode_s: time of a step that only decodes them.

        Returns:
            At least `MIN_TOKENS`, also before the first measurement. None if nothing is limited.
        """
        if math.isinf(limit_s):
            return None
        left_s = KEPT_SHARE * limit_s - decode_s
        if left_s <= 0.0 or not self._tokens:
            return MIN_TOKENS
        if not self._seconds:
            return None
        return max(int(left_s / self.token_s), MIN_TOKENS)

    def has_room(self, limit_s: float, decode_s: float) -> bool:
        """Whether a step with the smallest part of a prompt keeps the limit."""
        return decode_s + MIN_TOKENS * self.token_s <= KEPT_SHARE * limit_s
