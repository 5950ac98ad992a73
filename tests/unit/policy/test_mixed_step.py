from __future__ import annotations

import math

import pytest

from kvmesh.policy.mixed_step import KEPT_SHARE, MIN_TOKENS, MixedSteps


def test_without_a_limit_nothing_is_bounded() -> None:
    steps = MixedSteps()
    steps.add(512, 1.0)
    assert steps.most_tokens(math.inf, 0.01) is None
    assert steps.has_room(math.inf, 0.01)


def test_before_the_first_measurement_the_smallest_part_is_tried() -> None:
    assert MixedSteps().most_tokens(0.05, 0.01) == MIN_TOKENS


def test_a_part_takes_the_time_that_the_decode_step_leaves() -> None:
    steps = MixedSteps()
    steps.add(100, 0.01)  # 0.1 ms per token
    assert steps.most_tokens(0.03, 0.007) == int((KEPT_SHARE * 0.03 - 0.007) / 1e-4)


@pytest.mark.parametrize("fixed_s", [0.0, 0.004])
def test_steps_settle_at_the_limit_whatever_a_step_costs_at_least(fixed_s: float) -> None:
    steps, decode_s, token_s, limit_s = MixedSteps(), 0.01, 1e-4, 0.04
    for _ in range(200):
        num_tokens = steps.most_tokens(limit_s, decode_s)
        assert num_tokens is not None
        seconds = fixed_s + token_s * num_tokens
        steps.add(num_tokens, seconds)
    assert 0.95 * KEPT_SHARE * limit_s < decode_s + seconds <= limit_s


def test_a_prompt_that_has_begun_goes_on_where_no_step_keeps_the_limit() -> None:
    steps = MixedSteps()
    steps.add(100, 0.1)
    assert steps.most_tokens(0.01, 0.02) == MIN_TOKENS
    assert steps.most_tokens(0.01, 0.001) == MIN_TOKENS
    assert not steps.has_room(0.01, 0.001)
    assert steps.has_room(0.02, 0.001)
