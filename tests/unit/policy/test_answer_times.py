"""The wait for a worker's answer follows the slowest recent ones."""

from __future__ import annotations

import pytest

from kvmesh.policy.answer_times import (
    FACTOR,
    HALF_S,
    MAX_WAIT_S,
    MIN_ANSWERS,
    MIN_WAIT_S,
    AnswerTimes,
)


def measured(*seconds: float, now: float = 0.0) -> AnswerTimes:
    """Times with enough answers of a millisecond before the given ones."""
    times = AnswerTimes()
    for each in (*[0.001] * MIN_ANSWERS, *seconds):
        times.note(each, now)
    return times


def test_the_wait_is_long_until_enough_answers_were_seen() -> None:
    times = AnswerTimes()
    for _ in range(MIN_ANSWERS):
        assert times.wait_s(0.0) == MAX_WAIT_S
        times.note(0.001, 0.0)
    assert times.wait_s(0.0) == MIN_WAIT_S


def test_one_slow_answer_lengthens_the_wait_for_a_while() -> None:
    times = measured(0.2)
    assert times.wait_s(0.0) == pytest.approx(FACTOR * 0.2)
    assert times.wait_s(HALF_S) == pytest.approx(FACTOR * 0.1)
    times.note(0.001, HALF_S)
    assert times.wait_s(HALF_S) == pytest.approx(FACTOR * 0.1), "quick answers do not hide it"
    assert times.wait_s(1e6) == MIN_WAIT_S
    assert measured(5.0).wait_s(0.0) == MAX_WAIT_S


def test_one_worker_that_is_cut_off_does_not_lengthen_the_wait() -> None:
    times = measured()
    for _ in range(100):
        times.note_late(0.0)
        times.note(0.001, 0.0)
    assert times.wait_s(0.0) == MIN_WAIT_S


def test_where_nobody_answers_the_wait_doubles() -> None:
    times = measured()
    waits = []
    for _ in range(6):
        times.note_late(0.0)
        waits.append(times.wait_s(0.0))
    assert waits == [MIN_WAIT_S, 0.5, 1.0, MAX_WAIT_S, MAX_WAIT_S, MAX_WAIT_S]
