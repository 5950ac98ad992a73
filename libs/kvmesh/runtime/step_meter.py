"""Measures how the engine spent its last second. Bookkeeping without a clock.

Tests: tests/unit/runtime/test_step_meter.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class _Step:
    ended_at: float
    seconds: float
    has_prompt: bool


class StepMeter:
    """Shares of time by kind of step.

    A step with prompt tokens is bound by compute, a pure decode step by memory bandwidth. So the
    shares approximate the use of both on devices whose counters cannot be read.

    Args:
        budget_tokens: maximum number of tokens of a step.
    """

    def __init__(self, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens
        self._steps: deque[_Step] = deque()
        self._last_tokens = 0
        self._computed = 0
        self._generated = 0

    def add(self, seconds: float, computed_total: int, generated_total: int, now: float) -> None:
        """Adds a step that just ended.

        Args:
            computed_total, generated_total: tokens since the engine's start.
        """
        self._last_tokens = computed_total - self._computed
        # Each decoding sequence computes one token and generates one.
        has_prompt = self._last_tokens > generated_total - self._generated
        self._computed, self._generated = computed_total, generated_total
        self._steps.append(_Step(now, seconds, has_prompt))
        self._forget(now)

    @property
    def last_prompt_tokens(self) -> int:
        """Number of tokens of the last step if it had prompt tokens, else 0."""
        return self._last_tokens if self._steps and self._steps[-1].has_prompt else 0

    def budget_used(self, now: float) -> float:
        """Tokens of the last step as a fraction of the budget; 0 without a recent step."""
        self._forget(now)
        return min(self._last_tokens / self._budget_tokens, 1.0) if self._steps else 0.0

    def compute_used(self, now: float) -> float:
        """Fraction of the window in steps with prompt tokens."""
        return self._share(now, has_prompt=True)

    def memory_bandwidth_used(self, now: float) -> float:
        """Fraction of the window in pure decode steps."""
        return self._share(now, has_prompt=False)

    def _share(self, now: float, *, has_prompt: bool) -> float:
        self._forget(now)
        spent = sum(step.seconds for step in self._steps if step.has_prompt is has_prompt)
        return min(spent / WINDOW_S, 1.0)

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0].ended_at <= now - WINDOW_S:
            self._steps.popleft()
