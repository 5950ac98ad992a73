from __future__ import annotations

from services.gateway.placing import (
    FULL_PACE_WAITERS,
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    backoff_s,
)


def test_backoff_grows_to_its_limit() -> None:
    waits = [backoff_s(rounds, 1) for rounds in range(40)]
    assert waits[0] == MIN_BACKOFF_S
    assert waits == sorted(waits)
    assert waits[-1] == backoff_s(10**6, FULL_PACE_WAITERS) == MAX_BACKOFF_S


def test_many_waiting_requests_ask_at_a_bounded_rate() -> None:
    rates = [count / backoff_s(100, count) for count in (8, 80, 800)]
    assert max(rates) <= FULL_PACE_WAITERS / MAX_BACKOFF_S * 1.001
