from __future__ import annotations

import random

import pytest

from kvmesh.policy.prefill_times import MAX_SHARE, WAY_SHARE, PrefillTimes


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


def test_patience_keeps_a_share() -> None:
    times = PrefillTimes()
    times.note(40, 100.0)
    assert times.patience_s(40, 1.0) == 1.0 - MAX_SHARE
