"""How long a gateway waits for a worker's answer to a question before it asks another one.

Workers accept or refuse at once, within milliseconds. One that does not answer is probably cut off,
and each request that it was shown waits until the gateway gives up on the answer. How late healthy
workers answer depends on the machines, so the wait follows the slowest recent answer.
Tests: tests/unit/policy/test_answer_times.py.
"""

from __future__ import annotations

import math

MIN_WAIT_S = 0.25
MAX_WAIT_S = 2.0
"""Shortest and longest wait in seconds."""

FACTOR = 4.0
"""Wait over the slowest recent answer."""

HALF_S = 10.0
"""Seconds after which a slow answer counts half."""

MIN_ANSWERS = 16
"""Number of answers before the wait is shorter than `MAX_WAIT_S`."""


class AnswerTimes:
    """Slowest recent answer of all workers of a gateway. Every `now` is on one monotonic clock."""

    def __init__(self) -> None:
        self._slowest_s = 0.0
        self._at = 0.0
        self._num_answers = 0
        self._is_late = False

    def wait_s(self, now: float) -> float:
        """Returns the seconds to wait for an answer."""
        if self._num_answers < MIN_ANSWERS:
            return MAX_WAIT_S
        return min(max(FACTOR * self._slowest_at(now), MIN_WAIT_S), MAX_WAIT_S)

    def note(self, seconds: float, now: float) -> None:
        """Adds the time of an answer; its content does not matter."""
        self._slowest_s, self._at = max(seconds, self._slowest_at(now)), now
        self._num_answers += 1
        self._is_late = False

    def note_late(self, now: float) -> None:
        """Records that no answer came within `wait_s`.

        If no worker has answered since the answer before was late, the wait doubles: then not one
        worker is cut off, but all are slow.
        """
        if self._is_late:
            self._slowest_s, self._at = 2.0 * self.wait_s(now) / FACTOR, now
        self._is_late = True

    def _slowest_at(self, now: float) -> float:
        return self._slowest_s * math.pow(0.5, (now - self._at) / HALF_S)
