"""The wait for a worker's answer follows all workers' usual answers and the worker's own."""

from __future__ import annotations

import random

import pytest

from kvmesh.policy.answer_times import (
    FACTOR,
    HALF_S,
    LATE_SHARE,
    MAX_LATE_S,
    MAX_WAIT_S,
    MIN_ANSWERS,
    MIN_WAIT_S,
    AnswerTimes,
    WorkerAnswers,
)

NEW = WorkerAnswers()


def measured(*seconds: float, count: int = MIN_ANSWERS) -> AnswerTimes:
    """Times with so many answers of a millisecond before the given ones."""
    times = AnswerTimes()
    for each in (*[0.001] * count, *seconds):
        times.note(each, 0.0)
    return times


def answering(*seconds: float) -> WorkerAnswers:
    """A worker that answered one question after the other in these times."""
    answers, now = WorkerAnswers(), 0.0
    for number, each in enumerate(seconds):
        answers.asked(number, now)
        now += each
        assert answers.answered(number, now) == pytest.approx(min(each, MAX_WAIT_S))
    return answers


def test_the_wait_is_long_until_enough_answers_were_seen() -> None:
    times = AnswerTimes()
    for _ in range(MIN_ANSWERS):
        assert times.wait_s(NEW) == MAX_WAIT_S
        times.note(0.001, 0.0)
    assert times.wait_s(NEW) == MIN_WAIT_S


def test_single_slow_answers_do_not_lengthen_the_wait() -> None:
    assert measured(*[1.0] * 5, count=100).wait_s(NEW) == MIN_WAIT_S
    assert measured(*[0.1] * 6, count=100).wait_s(NEW) == pytest.approx(FACTOR * 0.1, rel=0.5)
    assert measured(*[1.0] * 6, count=100).wait_s(NEW) == MAX_WAIT_S


def test_old_answers_count_less_however_old_they_are() -> None:
    times = measured(*[1.0] * 100)
    now = 1e6  # longer than any weight could tell
    for _ in range(200):
        now += HALF_S
        times.note(0.001, now)
    assert times.wait_s(NEW) == MIN_WAIT_S
    for _ in range(100):
        times.note(0.2, now)
    assert times.wait_s(NEW) == pytest.approx(FACTOR * 0.2, rel=0.5)


def test_one_worker_that_is_cut_off_does_not_lengthen_the_wait() -> None:
    times = measured()
    for number in range(100):
        for _ in range(3):  # several requests were waiting for it
            times.note_late(number, number + MIN_WAIT_S)
        times.note(0.001, number + MIN_WAIT_S)
    assert times.wait_s(NEW) == MIN_WAIT_S


def test_where_nobody_answers_the_wait_doubles_until_somebody_does() -> None:
    times, now, waits = measured(), 0.0, []
    for _ in range(6):
        asked_at, now = now, now + times.wait_s(NEW)
        times.note_late(asked_at, now)
        times.note_late(asked_at, now)  # asked beside it, so it tells nothing new
        waits.append(times.wait_s(NEW))
    assert waits == [MIN_WAIT_S, 0.5, 1.0, MAX_WAIT_S, MAX_WAIT_S, MAX_WAIT_S]
    times.note(0.001, now)
    assert times.wait_s(NEW) == MIN_WAIT_S


def test_a_worker_on_a_slow_link_has_a_longer_wait_of_its_own() -> None:
    times = measured(count=1000)
    far = answering(*[0.3] * 20)
    assert 0.3 < times.wait_s(far) < 2 * 0.3
    assert times.wait_s(answering(0.3)) == pytest.approx(3 * 0.3), "one answer is enough"
    assert times.wait_s(answering(*[0.001] * 20)) == MIN_WAIT_S
    assert times.wait_s(answering(60.0)) == MAX_WAIT_S


def test_a_pause_of_a_worker_is_forgotten_after_some_answers() -> None:
    answers = answering(*[0.001] * 20, 1.0, *[0.001] * 12)
    assert measured().wait_s(answers) == MIN_WAIT_S


@pytest.mark.parametrize("spread_s", [0.0005, 0.02, 0.2])
def test_a_healthy_worker_is_given_up_at_most_once_in_a_thousand(spread_s: float) -> None:
    """Times of a busy machine: exponential, and one pause of a garbage collection in 200."""
    draw = random.Random(1)
    times, answers, now, given_up = AnswerTimes(), WorkerAnswers(), 0.0, 0
    for number in range(20_000):
        seconds = draw.expovariate(1 / spread_s) + 0.15 * (draw.random() < 0.005)
        given_up += seconds > times.wait_s(answers)
        answers.asked(number, now)
        now += seconds
        answers.answered(number, now)
        times.note(seconds, now)
    assert given_up <= 20


def test_a_late_answer_still_counts_and_ends_the_lateness() -> None:
    answers = WorkerAnswers()
    answers.asked("a", 0.0)
    answers.asked("b", 0.2)
    assert not answers.is_late(1.0, LATE_SHARE)
    assert answers.is_late(1.0, LATE_SHARE + 0.01)
    assert answers.answered("b", 0.6) == pytest.approx(0.4)
    assert not answers.is_late(1.0, 0.7), "it is alive, so the answer to `a` was lost"
    assert answers.answered("a", 0.7) is None
    assert answers.wait_s == pytest.approx(3 * 0.4)


def test_questions_without_an_answer_are_forgotten() -> None:
    answers = WorkerAnswers()
    answers.asked("a", 0.0)
    answers.asked("b", 1.0)
    assert answers.is_late(0.3, MAX_LATE_S)
    assert not answers.is_late(0.3, MAX_LATE_S + 1.0)
    answers.asked("c", 20.0)
    answers.forget()
    assert not answers.is_late(0.3, 21.0)
