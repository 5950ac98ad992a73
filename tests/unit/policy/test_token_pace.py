"""Limits on the time per token: what a batch takes, and what it can bear between its steps."""

from __future__ import annotations

import math
import random

import pytest

from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.policy.token_pace import (
    BEARABLE_MISSES,
    KEPT_SHARE,
    AnswerLength,
    StepFit,
    bears,
    spare_s,
    takes,
    time_used,
)

PACE = StepPace(0.010, 1e-7)


def fitted(contexts: list[float], noise: float = 0.0) -> StepPace:
    draw = random.Random(1)
    fit = StepFit()
    for context in contexts:
        fit.add(context, PACE.of(context) * (1 + noise * draw.uniform(-1, 1)))
    return fit.pace()


class TestFit:
    def test_nothing_is_known_at_first(self) -> None:
        assert StepFit().pace() == StepPace()

    @pytest.mark.parametrize("noise", [0.0, 0.05])
    def test_it_finds_constant_and_slope(self, noise: float) -> None:
        contexts = [10_000.0 * (1 + step % 30) for step in range(400)]
        for context in (20_000, 150_000, 300_000):
            assert fitted(contexts, noise).of(context) == pytest.approx(PACE.of(context), rel=0.05)

    def test_a_context_that_never_varied_says_nothing_of_others(self) -> None:
        pace = fitted([50_000.0] * 100)
        assert pace.token_s == 0.0
        assert pace.of(400_000) == pytest.approx(PACE.of(50_000))

    @pytest.mark.parametrize("mean", [10, 100, 300, 1500])
    def test_short_contexts_say_little_of_a_long_prompt(self, mean: int) -> None:
        # Steps grow with the number of sequences, and vary by a tenth.
        draw, fit = random.Random(2), StepFit()
        for step in range(300):
            count = 1 + step % 8
            context = count * mean * draw.uniform(0.8, 1.2)
            seconds = 0.010 + 0.001 * count + 1e-7 * context
            fit.add(context, seconds * draw.uniform(0.9, 1.1))
        limit_s = 0.04
        assert takes(PaceRoom(fit.pace(), 8 * mean, limit_s), limit_s, 8000)
        fit.add_run(20, (8.0 * mean + 8000.0, 0.08), (8.0, 1e-6))
        full = PaceRoom(fit.pace(), 8 * mean + 8000, limit_s)
        assert not takes(full, limit_s, 100), "its own steps tell"

    def test_neither_part_is_negative(self) -> None:
        fit = StepFit()
        for context, seconds in ((1e3, 0.5), (1e5, 0.1), (2e5, 0.0)):
            fit.add(context, seconds)
        pace = fit.pace()
        assert pace.token_s == 0.0
        assert pace.constant_s > 0.0

    def test_a_run_is_its_steps_one_by_one(self) -> None:
        run, single = StepFit(), StepFit()
        for count, first, growth in (
            (50, (1e4, 0.02), (8.0, 8e-7)),
            (1, (3e4, 0.021), (0.0, 0.0)),
            (2000, (1e5, 0.03), (30.0, 2e-6)),
            (2, (2e4, 0.01), (1.0, 1e-7)),
        ):
            run.add_run(count, first, growth)
            for step in range(count):
                single.add(first[0] + step * growth[0], first[1] + step * growth[1])
            ours, theirs = run.pace(), single.pace()
            assert ours.constant_s == pytest.approx(theirs.constant_s, rel=1e-9)
            assert ours.token_s == pytest.approx(theirs.token_s, rel=1e-9, abs=1e-18)

    def test_what_was_long_ago_is_forgotten(self) -> None:
        fit = StepFit()
        fit.add_run(100, (1e4, 9.0), (0.0, 0.0))
        fit.add_run(1000, (1e4, 0.02), (0.0, 0.0))
        assert fit.pace().of(1e4) == pytest.approx(0.02, rel=0.01)


class TestTakes:
    def test_without_limits_everything_is_taken(self) -> None:
        assert takes(PaceRoom(PACE, 10**9), math.inf, 10**6)

    def test_an_empty_worker_takes_whatever_comes(self) -> None:
        assert takes(PaceRoom(PACE), 0.001, 10**6)

    @pytest.mark.parametrize(("strictest", "own"), [(0.03, math.inf), (math.inf, 0.03)])
    def test_a_batch_is_full_where_its_steps_reach_the_strictest_limit(
        self, strictest: float, own: float
    ) -> None:
        most = (KEPT_SHARE * 0.03 - PACE.constant_s) / PACE.token_s
        room = PaceRoom(PACE, 100_000, strictest)
        assert takes(room, own, int(most) - 100_000)
        assert not takes(room, own, int(most) - 100_000 + 2)

    def test_unknown_steps_refuse_nobody(self) -> None:
        assert takes(PaceRoom(context_tokens=10**9), 0.001, 1)


class TestSpare:
    def test_nobody_with_a_limit_bears_everything(self) -> None:
        assert math.isinf(spare_s([], 0.02, 100.0))

    def test_what_was_gained_costs_nothing_and_the_rest_a_chance_to_end_before(self) -> None:
        # 0.2 s gained with 20 tokens; the 100 tokens of an answer make up for 1 s.
        paced = (0.03, 20, 0.4)
        assert spare_s([paced], 0.02, 100.0) == pytest.approx(0.2 + BEARABLE_MISSES * 1.0)

    def test_chances_of_several_add_up(self) -> None:
        # At 0.2 s the second one's chance begins, when the first one's is 0.2 / 10 s.
        many = [(0.12, 0, 0.0), (0.12, 10, 1.0)]
        spare = spare_s(many, 0.02, 100.0)
        assert spare / 10 + (spare - 0.2) / 10 == pytest.approx(BEARABLE_MISSES)

    def test_who_has_gained_more_than_others_bear_does_not_count(self) -> None:
        alone = spare_s([(0.03, 0, 0.0)], 0.02, 100.0)
        assert spare_s([(0.03, 0, 0.0), (0.03, 500, 5.0)], 0.02, 100.0) == alone

    def test_who_will_miss_it_anyhow_does_not_count(self) -> None:
        late = (0.03, 100, 9.0)
        assert math.isinf(spare_s([late], 0.02, 100.0))
        in_time = (0.03, 0, 0.0)
        assert spare_s([late, in_time], 0.02, 100.0) == spare_s([in_time], 0.02, 100.0)

    def test_who_makes_up_for_nothing_bears_what_it_has_gained(self) -> None:
        assert spare_s([(0.03, 50, 1.0)], 0.03, 100.0) == pytest.approx(0.5, abs=0.001)

    def test_short_answers_bear_less(self) -> None:
        paced = [(0.03, 0, 0.0)]
        assert spare_s(paced, 0.02, 30.0) < spare_s(paced, 0.02, 300.0)


class TestBears:
    def test_prompts_that_fit_into_what_is_spare(self) -> None:
        room = PaceRoom(PACE, 10_000, 0.03, 0.5)
        assert bears(room, 0.5)
        assert not bears(room, 0.51)

    def test_more_where_more_is_gained_by_it(self) -> None:
        room = PaceRoom(PACE, 10_000, 0.03, 0.5)
        assert bears(room, 1.0, 2 * BEARABLE_MISSES)
        assert not bears(room, 1.01, 2 * BEARABLE_MISSES)
        assert not bears(room, 0.01, 0.0)
        assert bears(PaceRoom(PACE, 10_000), 1e9, 0.0), "who has no limit misses none"

    def test_nothing_beside_steps_that_take_most_of_the_limit(self) -> None:
        assert time_used(PaceRoom(PACE, 100_000, 0.025)) == pytest.approx(0.8)
        assert not bears(PaceRoom(PACE, 100_000, 0.025, 100.0), 0.001)

    def test_everything_where_nobody_has_a_limit(self) -> None:
        room = PaceRoom(PACE, 10**9)
        assert time_used(room) == 0.0
        assert bears(room, 1e9)


def test_the_length_of_answers_follows_those_that_end() -> None:
    length = AnswerLength()
    for _ in range(500):
        length.add(40)
    assert length.tokens == pytest.approx(40, rel=0.01)
