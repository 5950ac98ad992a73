from __future__ import annotations

import random

import pytest

from kvmesh.policy.prefill_times import LEAST_SHARE, MAX_SHARE, WAY_SHARE, PrefillTimes


def test_nothing_known_takes_no_time_but_the_way() -> None:
    assert PrefillTimes().patience_s(100, 1.0) == 1.0 - WAY_SHARE


def test_most_prompts_stay_under_what_is_expected() -> None:
    rng = random.Random(1)
    times = PrefillTimes()
    late = 0
    for _ in range(1000):
        seconds = rng.gauss(0.1, 0.01)
        late += seconds > times.expected_s(40) > 0
        times.note(40, seconds)
    assert late < 20
    assert 0.1 < times.expected_s(40) < 0.16


def test_it_follows_a_change() -> None:
    times = PrefillTimes()
    for seconds in [0.1] * 50 + [0.4] * 50:
        times.note(40, seconds)
    assert times.expected_s(40) == pytest.approx(0.4, rel=0.05)


def test_lengths_are_apart_and_the_nearest_one_stands_in() -> None:
    times = PrefillTimes()
    for _ in range(50):
        times.note(16, 0.01)
        times.note(4096, 2.0)
    assert times.expected_s(31) < 0.02
    assert times.expected_s(5000) > 1.9
    assert times.expected_s(100) == times.expected_s(16)
    assert times.expected_s(100_000) == times.expected_s(4096)


def test_patience_keeps_a_share_although_times_vary() -> None:
    times = PrefillTimes()
    for number in range(50):
        times.note(40, 0.1 + number % 2)
    assert times.expected_s(40) > 2.0
    assert times.patience_s(40, 4.0) == 4.0 * (1 - MAX_SHARE)


def test_what_takes_longer_than_its_limit_waits_for_nobody() -> None:
    times = PrefillTimes()
    for _ in range(50):
        times.note(40, 3.0)
    assert times.patience_s(40, 4.0) == pytest.approx(1.0)
    assert times.patience_s(40, 3.1) == pytest.approx(LEAST_SHARE * 3.1)
    assert times.patience_s(40, 1.0) == LEAST_SHARE
