from __future__ import annotations

import pytest

from kvmesh.policy.crowd import MIN_LAG_S, MIN_PACED, MIN_WAITING, Crowd, Lag

MANY = 3 * MIN_WAITING


def _busy(interval_s: float, tenant: str = "a") -> Crowd:
    """Many wait, and one is placed each `interval_s`, another coming in its place."""
    crowd = Crowd()
    for _ in range(MANY):
        crowd.enter(tenant)
    for number in range(100):
        crowd.leave(tenant, number * interval_s, placed=True)
        crowd.enter(tenant)
    return crowd


def test_the_wait_is_the_queue_at_the_pace_of_service() -> None:
    crowd = _busy(0.01)
    assert crowd.num_waiting == MANY
    assert crowd.wait_s("a") == pytest.approx(MANY * 0.01, rel=0.01)
    assert crowd.is_hopeless("a", 1.0)
    assert not crowd.is_hopeless("a", 3.0)


def test_it_follows_the_pace() -> None:
    crowd = _busy(0.01)
    now = 1.0
    for _ in range(200):
        now += 0.001
        crowd.leave("a", now, placed=True)
        crowd.enter("a")
    assert not crowd.is_hopeless("a", 1.0)


def test_the_first_intervals_count_like_all_others() -> None:
    crowd = Crowd()
    for _ in range(MANY):
        crowd.enter("a")
    crowd.leave("a", 0.0, placed=True)
    crowd.enter("a")
    for number in range(MIN_PACED):
        assert crowd.wait_s("a") == 0.0, "too few to tell"
        # A long prompt in the way, then one after the other.
        crowd.leave("a", 1.0 + 0.01 * number, placed=True)
        crowd.enter("a")
    mean_s = (1.0 + 0.01 * (MIN_PACED - 1)) / MIN_PACED
    assert crowd.wait_s("a") == pytest.approx(MANY * mean_s)


def test_another_tenant_is_not_refused_for_it() -> None:
    assert _busy(1.0).wait_s("b") == 0.0


def test_a_few_that_wait_are_never_too_many() -> None:
    crowd = _busy(10.0)
    for _ in range(MANY - MIN_WAITING + 1):
        crowd.leave("a", 1000.0, placed=False)
    assert crowd.wait_s("a") == 0.0


def test_gaps_between_requests_that_nobody_waits_for_are_no_pace() -> None:
    crowd = Crowd()
    for number in range(100):
        crowd.enter("a")
        crowd.leave("a", number * 60.0, placed=True)
    for _ in range(MANY):
        crowd.enter("a")
    assert crowd.wait_s("a") == 0.0
    # The first one placed in a busy time tells nothing of the quiet time before it.
    crowd.leave("a", 9000.0, placed=True)
    assert crowd.wait_s("a") == 0.0


def test_those_that_give_up_are_not_served() -> None:
    crowd = _busy(0.01)
    pace = crowd.wait_s("a") / MANY
    for _ in range(50):
        crowd.leave("a", 1.0, placed=False)
        crowd.enter("a")
    assert crowd.wait_s("a") == pytest.approx(MANY * pace)


def test_a_process_that_is_late_itself_takes_nothing_on() -> None:
    lag = Lag()
    for _ in range(40):
        lag.note(2.0)
    assert lag.is_hopeless(1.0)
    for _ in range(9):
        lag.note(0.1)
    assert 0.2 < lag.now_s < MIN_LAG_S
    assert not lag.is_hopeless(0.02)  # a busy moment
    for _ in range(40):
        lag.note(0.0)
    assert not lag.is_hopeless(1.0)


def test_the_worst_lag_is_remembered_for_a_while() -> None:
    lag = Lag()
    lag.note(0.2)
    for _ in range(20):
        lag.note(0.01)
    assert 0.08 < lag.peak_s < 0.14
    lag.note(0.3)
    assert lag.peak_s == 0.3
