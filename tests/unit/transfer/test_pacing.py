"""Budgets of a link."""

import random

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.transfer.pacing import CreditWindow, Pacer, TokenBucket


def test_a_burst_is_free_and_then_the_rate_holds() -> None:
    bucket = TokenBucket(bytes_per_s=100.0, burst_bytes=50)

    assert bucket.take(50, now=10.0) == 0.0
    assert bucket.take(100, now=10.0) == pytest.approx(1.0)
    assert bucket.take(100, now=10.5) == pytest.approx(1.5)
    assert bucket.take(50, now=20.0) == 0.0


def test_no_pattern_of_calls_beats_the_rate() -> None:
    rng = random.Random(5)
    bucket, clock, sent = TokenBucket(1000.0, 100), ManualClock(), 0
    for _ in range(500):
        num_bytes = rng.randrange(1, 200)
        clock.advance(bucket.take(num_bytes, clock.now()) + rng.choice([0.0, 0.01]))
        sent += num_bytes
        assert sent <= 1000.0 * clock.now() + 100 + 1e-6


def test_a_pacer_takes_small_pieces_of_a_slow_link() -> None:
    assert Pacer(1e5, ManualClock()).piece_bytes == 16 << 10
    assert Pacer(1e12, ManualClock()).piece_bytes == 1 << 20
    pacer = Pacer(1e6, ManualClock())
    assert pacer.delay(pacer.piece_bytes) == 0.0
    assert pacer.delay(500_000) == pytest.approx(0.5)


def test_a_window_bounds_what_is_unanswered_but_lets_one_piece_through() -> None:
    window = CreditWindow(100)
    assert window.has_room(1000)
    window.spend(60)
    assert window.has_room(40)
    assert not window.has_room(41)
    window.give_back(60)
    assert window.has_room(1000)
    with pytest.raises(AssertionError):
        window.give_back(1)


def test_a_window_of_zero_is_no_bound() -> None:
    window = CreditWindow(0)
    window.spend(1 << 40)
    assert window.has_room(1)
