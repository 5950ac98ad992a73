"""The estimated time of a prompt follows from steps of any size."""

from __future__ import annotations

import random

import pytest

from kvmesh.policy.prompt_time import PromptTime

STEP_S, TOKEN_S = 0.01, 50e-6
MAX_STEP = 8192


def seconds(num_tokens: int) -> float:
    return STEP_S + TOKEN_S * num_tokens


def measured(*sizes: int) -> PromptTime:
    time = PromptTime(MAX_STEP)
    for size in sizes:
        time.add(size, seconds(size))
    return time


def test_nothing_is_known_before_the_first_step() -> None:
    assert measured().of(1000) == 0.0


def test_steps_of_one_size_tell_of_such_prompts() -> None:
    assert measured(*[500] * 10).of(500) == pytest.approx(seconds(500))
    assert measured(500).of(MAX_STEP * 3) == pytest.approx(MAX_STEP * 3 / 500 * seconds(500))


def test_small_steps_do_not_make_a_long_prompt_look_slow() -> None:
    sizes = random.Random(1).choices(range(1, 40), k=200)
    assert measured(*sizes).of(4096) == pytest.approx(seconds(4096), rel=0.1)
    assert measured(MAX_STEP, *[4] * 50).of(4096) == pytest.approx(seconds(4096), rel=0.05)


def test_a_prompt_of_several_steps_has_the_constant_of_each() -> None:
    of_three = measured(*[100, 8000] * 20).of(MAX_STEP * 2 + 1)
    assert of_three == pytest.approx(3 * STEP_S + TOKEN_S * (MAX_STEP * 2 + 1), rel=0.01)


def test_it_follows_a_change() -> None:
    time = measured(*[100, 1000] * 100)
    for size in [100, 1000] * 150:
        time.add(size, 3 * seconds(size))
    assert time.of(1000) == pytest.approx(3 * seconds(1000), rel=0.05)


@pytest.mark.parametrize("steps", [[(100, 0.5), (200, 0.1)], [(100, 0.01), (200, 0.5)]])
def test_no_part_is_negative(steps: list[tuple[int, float]]) -> None:
    time = PromptTime(MAX_STEP)
    for num_tokens, took_s in steps:
        time.add(num_tokens, took_s)
    times = [time.of(num_tokens) for num_tokens in (1, 100, 1000, 100_000)]
    assert times == sorted(times)
    assert times[0] > 0.0
