from __future__ import annotations

import random

import pytest

from kvmesh.client.retry import NO_RETRY, Attempts, RetryPolicy
from kvmesh.core.clock import ManualClock
from kvmesh.core.errors import (
    DeadlineError,
    InvalidRequestError,
    KvMeshError,
    LostError,
    RefusedError,
)
from kvmesh.core.types import Refusal, RefusalReason

BUSY = RefusedError(Refusal(RefusalReason.BUSY, "busy"))


def _wait(error: KvMeshError, attempt: int = 1, remaining_s: float | None = None) -> float | None:
    policy = RetryPolicy(attempts=4, initial_s=0.2, max_s=0.5)
    return policy.wait_s(error, attempt, remaining_s, random.Random(1))


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("no"),
        DeadlineError("late"),
        RefusedError(Refusal(RefusalReason.TOO_LONG, "long")),
        RefusedError(Refusal(RefusalReason.INVALID, "bad")),
        RefusedError(Refusal(RefusalReason.DEADLINE, "late")),
    ],
)
def test_what_is_never_sent_again(error: KvMeshError) -> None:
    assert _wait(error) is None


@pytest.mark.parametrize("attempt", [1, 2, 3])
@pytest.mark.parametrize("error", [BUSY, LostError("gone")])
def test_backoff_grows_up_to_its_limit(error: KvMeshError, attempt: int) -> None:
    policy = RetryPolicy(attempts=4, initial_s=0.2, max_s=0.5)
    limit = min(0.5, 0.2 * 2 ** (attempt - 1))
    waits = [policy.wait_s(error, attempt, None, random.Random(seed)) for seed in range(200)]
    assert all(wait is not None and 0 <= wait <= limit for wait in waits)
    assert max(wait for wait in waits if wait is not None) > 0.9 * limit


def test_the_last_attempt() -> None:
    assert _wait(BUSY, attempt=4) is None
    assert NO_RETRY.wait_s(BUSY, 1, None, random.Random(1)) is None


def test_the_servers_hint_is_a_lower_bound() -> None:
    wait = _wait(RefusedError(Refusal(RefusalReason.QUOTA, "slow down", retry_after_ms=3000)))
    assert wait is not None
    assert 3.0 <= wait <= 3.2


def test_what_would_be_late_now_may_be_in_time_later() -> None:
    late = RefusedError(Refusal(RefusalReason.DEADLINE, "others first", retry_after_ms=3000))
    wait = _wait(late)
    assert wait is not None
    assert 3.0 <= wait <= 3.2


def test_no_wait_beyond_the_deadline() -> None:
    hint = RefusedError(Refusal(RefusalReason.BUSY, "busy", retry_after_ms=3000))
    assert _wait(hint, remaining_s=2.0) is None
    assert _wait(hint, remaining_s=4.0) is not None


def test_attempts_share_one_deadline() -> None:
    clock = ManualClock()
    attempts = Attempts(RetryPolicy(attempts=9), 10.0, clock, random.Random(1))
    assert attempts.begin() == 10.0
    clock.advance(4)
    assert attempts.wait_after(BUSY) < 0.2
    assert attempts.begin() == 6.0
    clock.advance(6)
    with pytest.raises(RefusedError):
        attempts.wait_after(BUSY)
    with pytest.raises(DeadlineError):
        attempts.begin()


def test_attempts_are_counted() -> None:
    attempts = Attempts(RetryPolicy(attempts=2), None, ManualClock(), random.Random(1))
    assert attempts.begin() is None
    attempts.wait_after(BUSY)
    attempts.begin()
    with pytest.raises(RefusedError):
        attempts.wait_after(BUSY)
