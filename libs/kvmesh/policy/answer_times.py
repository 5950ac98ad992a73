"""How long a gateway waits for a worker's answer to a question before it asks another one.

Workers accept or refuse at once, within milliseconds. One that does not answer is probably cut off,
and each request that asks it waits until the gateway gives up on the answer. To give up too early
costs little: the question is cancelled, and the late answer still counts as one.
The estimate per worker is TCP's for a retransmission (RFC 6298).
Tests: tests/unit/policy/test_answer_times.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from itertools import accumulate

MIN_WAIT_S = 0.25
"""Shortest wait in seconds, also where all answer sooner: it covers a garbage collection, and the
pauses of a process whose machine is busy."""

MAX_WAIT_S = 2.0
"""Longest wait in seconds."""

QUANTILE = 0.95
FACTOR = 4.0
"""The wait is at least `FACTOR` times this quantile of all workers' answers. A single slow answer
does not change it."""

HALF_S = 10.0
"""Seconds after which an answer counts half."""

MIN_ANSWERS = 16
"""Number of answers before the wait is shorter than `MAX_WAIT_S`: the first ones are slow."""

LATE_SHARE = 0.25
"""A worker is late, and tried last, when a question is open for this share of the wait. The order
of the workers changes so early because a wrong order costs nothing."""

MAX_LATE_S = 10.0
"""Seconds after which a question without an answer is forgotten, and its worker tried again."""

_LIMITS_S = [0.001 * 2 ** (number / 2) for number in range(23)]
"""Upper limits of a histogram's buckets, from a millisecond to two seconds; one more has the rest.
"""
_MAX_HALVES = 64.0


class AnswerTimes:
    """Times of all workers' answers to a gateway. Every `now` is on one monotonic clock."""

    def __init__(self) -> None:
        # Newer answers weigh more, so that older ones need not be made lighter.
        self._weights = [0.0] * (len(_LIMITS_S) + 1)
        self._since = 0.0
        self._num_answers = 0
        self._usual_s = 0.0
        self._late_at: float | None = None
        self._backoff = 1.0

    def wait_s(self, of_worker: WorkerAnswers) -> float:
        """Returns the seconds to wait for a worker's answer: the longest of all estimates."""
        if self._num_answers < MIN_ANSWERS:
            return MAX_WAIT_S
        return min(max(self._usual_s, of_worker.wait_s), MAX_WAIT_S)

    def note(self, seconds: float, now: float) -> None:
        """Adds the time of an answer; its content does not matter."""
        halves = (now - self._since) / HALF_S
        if halves > _MAX_HALVES:
            self._weights = [each * 0.5**halves for each in self._weights]
            self._since, halves = now, 0.0
        self._weights[bisect_left(_LIMITS_S, seconds)] += 2.0**halves
        self._num_answers += 1
        self._late_at, self._backoff = None, 1.0
        self._estimate()

    def note_late(self, asked_at: float, now: float) -> None:
        """Records that no answer came within `wait_s`.

        If no worker answered for a whole wait since the answer before was late, the wait doubles:
        then not one worker is cut off, but all are slow.
        """
        if self._late_at is None:
            self._late_at = now
        elif asked_at >= self._late_at:
            self._late_at = now
            self._backoff = min(2.0 * self._backoff, MAX_WAIT_S / MIN_WAIT_S)
            self._estimate()

    def _estimate(self) -> None:
        sums = list(accumulate(self._weights))
        place = bisect_left(sums, QUANTILE * sums[-1])
        limit_s = _LIMITS_S[place] if place < len(_LIMITS_S) else MAX_WAIT_S
        self._usual_s = self._backoff * max(FACTOR * limit_s, MIN_WAIT_S)


class WorkerAnswers:
    """Open questions to one worker, and the times of its answers.

    Questions are in the order in which they were asked. One that was given up or cancelled stays
    open until its answer comes, since a late answer tells how slow the worker is.
    """

    def __init__(self) -> None:
        self._asked: dict[Hashable, float] = {}
        self._mean_s = self._deviation_s = 0.0
        self._is_measured = False

    @property
    def wait_s(self) -> float:
        """Seconds to wait by this worker's own answers; 0 before the first one."""
        return self._mean_s + 4.0 * self._deviation_s

    @property
    def has_open(self) -> bool:
        """Whether a question is open."""
        return bool(self._asked)

    def asked(self, question: Hashable, now: float) -> None:
        """Notes a question."""
        self._asked[question] = now

    def answered(self, question: Hashable, now: float) -> float | None:
        """Notes an answer, also one that comes late; returns its seconds, None if it had come.

        The worker is alive, so earlier questions that are still open are forgotten.
        """
        asked_at = self._asked.pop(question, None)
        if asked_at is None:
            return None
        for earlier in [each for each, at in self._asked.items() if at < asked_at]:
            del self._asked[earlier]
        seconds = min(now - asked_at, MAX_WAIT_S)
        self._note(seconds)
        return seconds

    def is_late(self, wait_s: float, now: float) -> bool:
        """Whether an answer is overdue, measured by the wait for one."""
        while self._asked:
            oldest = next(iter(self._asked))
            age_s = now - self._asked[oldest]
            if age_s < MAX_LATE_S:
                return age_s > LATE_SHARE * wait_s
            del self._asked[oldest]
        return False

    def forget(self) -> None:
        """Forgets all open questions: the connection broke, so their answers will not come."""
        self._asked.clear()

    def _note(self, seconds: float) -> None:
        if not self._is_measured:
            self._mean_s, self._deviation_s, self._is_measured = seconds, seconds / 2, True
            return
        self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (seconds - self._mean_s) / 8
