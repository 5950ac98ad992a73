"""Decides whether and when to send a request again; time and randomness are arguments.

The next attempt includes the delivered tokens and the answer continues after them, so no token is
ever repeated. Tests: tests/unit/client/test_retry.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvmesh.core.clock import Clock
from kvmesh.core.errors import DeadlineError, KvMeshError, RefusedError
from kvmesh.core.types import RefusalReason

_FINAL = {RefusalReason.TOO_LONG, RefusalReason.INVALID}
"""The same request would be refused again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter.

    Attributes:
        attempts: maximum number of times a request is sent before its first token; 1 never retries.
        resumes: maximum number of times a cut stream is requested before its next token; 0 never
            resumes one.
        initial_s: upper limit of the first wait.
        max_s: upper limit of any wait.
    """

    attempts: int = 3
    resumes: int = 20
    initial_s: float = 0.2
    max_s: float = 5.0

    def wait_s(
        self,
        error: KvMeshError,
        attempt: int,
        remaining_s: float | None,
        rng: random.Random,
        *,
        has_begun: bool = False,
    ) -> float | None:
        """Seconds to wait before the next attempt; None gives up.

        Args:
            error: the error that ended the attempt.
            attempt: number of the failed attempt, from 1; counted anew after each delivery.
            remaining_s: time left for the request; None is unlimited.
            rng: source of the jitter.
            has_begun: tokens were delivered.
        """
        longest = self.resumes if has_begun else self.attempts - 1
        if attempt > longest or not error.retry_safe:
            return None
        backoff = min(self.max_s, self.initial_s * 2 ** (attempt - 1))
        wait = rng.uniform(0.0, backoff)
        if isinstance(error, RefusedError):
            refusal = error.refusal
            is_over = refusal.reason is RefusalReason.DEADLINE and not refusal.retry_after_ms
            if is_over or refusal.reason in _FINAL:
                return None
            # The server knows best when it has room; the jitter on top keeps clients apart.
            wait += refusal.retry_after_ms / 1000
        if remaining_s is not None and wait >= remaining_s:
            return None
        return wait


NO_RETRY = RetryPolicy(attempts=1, resumes=0)


class Attempts:
    """The attempts of one call: the time left, and the decision after a failure."""

    def __init__(
        self, policy: RetryPolicy, timeout_s: float | None, clock: Clock, rng: random.Random
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._deadline = None if timeout_s is None else clock.now() + timeout_s
        self._made = 0
        self._has_begun = False

    def begin(self) -> float | None:
        """Counts an attempt. Returns the seconds it may take; None is unlimited.

        Raises:
            DeadlineError: no time is left.
        """
        remaining = self._remaining_s()
        if remaining is not None and remaining <= 0:
            raise DeadlineError("the deadline passed before the request could be sent")
        self._made += 1
        return remaining

    def delivered(self) -> None:
        """Notes a delivery, from which attempts are counted anew."""
        self._made, self._has_begun = 1, True

    def wait_after(self, error: KvMeshError) -> float:
        """Seconds to wait before the next attempt; raises `error` if there is none."""
        wait = self._policy.wait_s(
            error, self._made, self._remaining_s(), self._rng, has_begun=self._has_begun
        )
        if wait is None:
            raise error
        return wait

    def _remaining_s(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._clock.now()
