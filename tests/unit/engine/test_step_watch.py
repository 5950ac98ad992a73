from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import PartPace, SequenceChunk
from kvmesh.engine.step_watch import MIN_KNOWN, WINDOW_S, StepWatch


def chunk(end: int, tokens: int = 1) -> SequenceChunk:
    return SequenceChunk(1, (), end - tokens, end, (), 1, SamplingParams(), sample=True)


DECODE: Sequence[SequenceChunk] = [chunk(100)] * 4
PROMPT: Sequence[SequenceChunk] = [chunk(20_000, 512)]


class Steps:
    def __init__(self) -> None:
        self.watch = StepWatch()
        self.now = 0.0

    def run(self, chunks: Sequence[SequenceChunk], took_s: float, count: int = 1) -> None:
        for _ in range(count):
            self.watch.begin(chunks, self.now)
            self.now += took_s
            self.watch.end(self.now)

    @property
    def slowdown(self) -> float:
        return self.watch.state(self.now).slowdown


def test_a_step_that_runs_has_an_age_and_what_it_should_take() -> None:
    steps = Steps()
    steps.run(DECODE, 0.05, 2 * MIN_KNOWN)
    assert steps.watch.state(steps.now).age_s == 0.0
    steps.watch.begin(DECODE, steps.now)
    state = steps.watch.state(steps.now + 2.0)
    assert state.age_s == pytest.approx(2.0)
    assert state.expected_s == pytest.approx(0.05)


def test_nothing_is_expected_of_a_step_of_a_new_kind() -> None:
    steps = Steps()
    steps.run(DECODE, 0.05, 2 * MIN_KNOWN)
    steps.watch.begin(PROMPT, steps.now)
    state = steps.watch.state(steps.now + 5.0)
    assert (state.age_s, state.expected_s, state.slowdown) == (5.0, 0.0, 0.0)


def test_more_positions_for_as_many_tokens_take_so_much_longer_at_most() -> None:
    steps = Steps()
    steps.run(DECODE, 0.05, 2 * MIN_KNOWN)
    steps.watch.begin([chunk(800)] * 4, steps.now)
    state = steps.watch.state(steps.now + 1.0)
    assert state.expected_s == pytest.approx(8 * 0.05)
    assert state.slowdown == pytest.approx(1.0), "it is no measure of how slow the engine is"


def test_a_step_larger_than_all_before_may_take_as_much_longer() -> None:
    steps = Steps()
    steps.run(PROMPT, 3.0, MIN_KNOWN)
    steps.watch.begin([chunk(20_000, 16_384)], steps.now)
    state = steps.watch.state(steps.now + 90.0)
    assert state.expected_s == pytest.approx(3.0 * 32)
    assert state.slowdown == 0.0
    steps.watch.end(steps.now)
    steps.run(PROMPT, 0.001, 200)
    steps.watch.begin([chunk(2000, 1024)], steps.now)
    assert steps.watch.state(steps.now).expected_s >= 6.0


def test_long_prompts_make_no_engine_slow() -> None:
    steps = Steps()
    steps.run(PROMPT, 3.0, MIN_KNOWN)
    steps.run(DECODE, 0.05, 40)
    steps.run(PROMPT, 3.0)
    assert steps.slowdown == pytest.approx(1.0)


def test_tenfold_steps_are_seen_within_the_window() -> None:
    steps = Steps()
    steps.run(DECODE, 0.05, 100)
    assert steps.slowdown == pytest.approx(1.0)
    began = steps.now
    while steps.now - began < WINDOW_S:
        steps.run(DECODE, 0.5)
    assert steps.slowdown > 8


def test_what_the_process_waited_for_a_core_is_no_fault_of_its_engine() -> None:
    steps = Steps()
    steps.run(DECODE, 0.05, 100)
    steps.watch.state(steps.now, 7.0)
    steps.watch.begin(DECODE, steps.now)
    state = steps.watch.state(steps.now + 2.0, 8.95)
    assert state.age_s == pytest.approx(0.05)
    assert state.slowdown == pytest.approx(1.0)
    state = steps.watch.state(steps.now + 4.0, 8.95)
    assert state.age_s == pytest.approx(2.05), "since then it could have run"


def test_a_slower_engine_becomes_the_usual_one_after_minutes() -> None:
    steps = Steps()
    steps.run(DECODE, 0.05, 100)
    steps.run(DECODE, 0.5, 60)
    assert steps.slowdown > 4, "after half a minute it is still slow"
    steps.run(DECODE, 0.5, 2000)
    assert steps.slowdown < 1.5
    steps.now += 2 * WINDOW_S
    assert steps.slowdown == 0.0, "nobody knows of an engine that rests"


def test_a_step_of_a_part_counts_what_it_computes_of_it() -> None:
    """One of a prompt of 8,192 tokens takes as long as one of 512, and is not that much faster."""
    part = [replace(chunk(8192, 8192), pace=PartPace(512, 512))]
    steps = Steps()
    steps.run([chunk(8192, 512)], 0.5, 2 * MIN_KNOWN)
    steps.watch.begin(part, steps.now)
    assert steps.watch.state(steps.now).expected_s == pytest.approx(0.5)
