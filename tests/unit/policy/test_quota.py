from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.policy.quota import (
    Quota,
    Rate,
    Tenant,
    TenantLimits,
    TenantUsage,
    charge,
    check_usage,
    wait_s,
)


def test_a_burst_then_the_rate() -> None:
    rate, until, now = Rate(60, burst_s=10), 0.0, 1000.0
    for _ in range(10):
        assert wait_s(until, rate, now) == 0
        until = charge(until, rate, 1, now)
    assert wait_s(until, rate, now) == pytest.approx(1.0)
    assert wait_s(until, rate, now + 1.0) == pytest.approx(0.0)


def test_at_least_one_unit_fits() -> None:
    rate = Rate(1, burst_s=10)
    assert wait_s(0.0, rate, 0.0) == 0
    assert wait_s(charge(0.0, rate, 1, 0.0), rate, 0.0) == pytest.approx(60)


def test_what_was_used_beyond_the_limit_is_paid_later() -> None:
    rate = Rate(600, burst_s=6)  # 60 at once
    until = charge(0.0, rate, 660, 0.0)
    assert wait_s(until, rate, 0.0) == pytest.approx(60.1)
    assert wait_s(until, rate, 60.2) == 0


def test_no_limit_counts_nothing() -> None:
    rate = Rate(0, burst_s=10)
    assert charge(5.0, rate, 1e9, 0.0) == 5.0
    assert wait_s(1e9, rate, 0.0) == 0


@given(
    st.integers(1, 6000),
    st.floats(0, 60),
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 40)), max_size=60),
)
def test_usage_never_runs_ahead_by_more_than_a_burst_and_one_request(
    per_min: int, burst_s: float, calls: list[tuple[float, int]]
) -> None:
    rate, until, now, used, largest = Rate(per_min, burst_s), 0.0, 0.0, 0.0, 0
    for pause, units in calls:
        now += pause
        if wait_s(until, rate, now) == 0:
            until = charge(until, rate, units, now)
            used += units
            largest = max(largest, units)
    allowed = (now + max(burst_s, rate.interval_s)) / rate.interval_s
    assert used <= allowed + largest + 1e-6


@pytest.mark.parametrize(
    ("limits", "usage", "quota"),
    [
        (TenantLimits(max_concurrent=2), TenantUsage(num_open=2), Quota.CONCURRENCY),
        (TenantLimits(requests_per_min=60), TenantUsage(requests_until=200), Quota.REQUESTS),
        (TenantLimits(tokens_per_min=60), TenantUsage(tokens_until=200), Quota.TOKENS),
    ],
)
def test_the_limit_that_is_used_up_is_named(
    limits: TenantLimits, usage: TenantUsage, quota: Quota
) -> None:
    refusal = check_usage(usage, limits, 10.0, now=100.0)
    assert refusal is not None
    assert refusal.quota is quota
    assert refusal.retry_after_s > 0
    assert check_usage(TenantUsage(), limits, 10.0, now=100.0) is None


@pytest.mark.parametrize("name", ["requests_per_min", "tokens_per_min", "max_concurrent"])
def test_who_has_any_limit_is_not_open(name: str) -> None:
    assert not TenantLimits(**{name: 1}).is_open
    assert TenantLimits(priority=1, weight=2.0).is_open


def test_a_salt_says_where_the_tenants_name_ends() -> None:
    assert Tenant("t").salted("x") == "0::x"
    assert Tenant("t").salted("1:a:b") != Tenant(namespace="a").salted("b")
    assert Tenant("t").salted("") == ""
    salts = {Tenant(namespace=space).salted(salt) for space, salt in (("a", "b:c"), ("a:b", "c"))}
    assert len(salts) == 2
    assert Tenant(namespace="a").salted("b") != Tenant(namespace="a").salted("c")
