"""Times of calls of all sizes, from a few measured ones."""

from __future__ import annotations

import pytest

from kvmesh.policy.linear_time import LinearTime

FIRST = LinearTime(call_s=0.001, unit_s=1e-4)


@pytest.mark.parametrize("true", [LinearTime(1e-4, 1e-5), LinearTime(0.02, 4e-4)])
def test_samples_lead_to_what_was_measured(true: LinearTime) -> None:
    time, sizes = FIRST, (1, 1_000)
    for _ in range(80):
        for units in sizes:
            time = time.with_sample(units, true.estimate_s(1, units))
    for units in sizes:
        assert time.estimate_s(1, units) == pytest.approx(true.estimate_s(1, units), rel=0.1)


def test_one_odd_sample_moves_little() -> None:
    assert FIRST.with_sample(1, 1e6).call_s < 4 * FIRST.call_s


def test_a_small_slow_call_says_little_about_large_ones() -> None:
    """One of a unit takes 5 ms, of which nearly all is constant."""
    time = FIRST.with_sample(1, 0.005)
    assert time.estimate_s(1, 40) < 2 * FIRST.estimate_s(1, 40)


def test_what_is_avoided_is_tried_again_some_day() -> None:
    time = FIRST
    for _ in range(50):
        time = time.without_call()
    assert time.estimate_s(1, 40) < FIRST.estimate_s(1, 40) / 10
