from __future__ import annotations

import pytest

from kvmesh.core.pace import StepPace
from kvmesh.core.types import Role
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.pdserve import InstanceProfile, RatioReason, RatioStep
from kvmesh.policy.prfaas import ServingProfile
from kvmesh.policy.profiled_ratio import (
    MeanLengths,
    checked_step,
    measured_profile,
    planned_profile,
    step_by_rate,
)

EVEN = InstanceProfile(1, 1.0, 10, 10.0)
"""Both roles serve one request per second and instance."""


def grows(role: Role) -> RatioStep:
    return RatioStep(role, RatioReason.PREFILL_GREW)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "grow", "is_taken"),
    [
        (2, 6, Role.PREFILL, True),
        (4, 4, Role.PREFILL, False),
        (4, 4, Role.DECODE, False),
        (5, 3, Role.PREFILL, False),
        (5, 3, Role.DECODE, True),
        (20, 20, Role.PREFILL, True),  # one of twenty less is no difference that counts
    ],
)
def test_no_step_is_taken_that_lowers_the_rate(
    num_prefill: int, num_decode: int, grow: Role, is_taken: bool
) -> None:
    step = checked_step(grows(grow), EVEN, num_prefill, num_decode)
    expected = grows(grow) if is_taken else RatioStep(None, RatioReason.AGAINST_RATE)
    assert step == expected


def by_rate(grow: Role, count: int) -> RatioStep:
    return RatioStep(grow, RatioReason.BY_RATE, count)


def test_the_best_split_may_be_several_instances_away() -> None:
    assert step_by_rate(EVEN, 2, 6) == by_rate(Role.PREFILL, 2)
    assert step_by_rate(EVEN, 6, 2) == by_rate(Role.DECODE, 2)
    assert step_by_rate(EVEN, 4, 4) is None
    assert step_by_rate(EVEN, 21, 19) is None, "no gain that counts"
    assert step_by_rate(EVEN, 1, 2) is None, "too few for two of each"


def test_a_step_that_asks_for_nothing_is_left_alone() -> None:
    for reason in (RatioReason.STEADY, RatioReason.UNCLEAR):
        assert checked_step(RatioStep(None, reason), EVEN, 2, 6) == RatioStep(None, reason)


def test_a_measured_batch_is_what_slots_and_blocks_hold() -> None:
    lengths = MeanLengths(uncached=500, prompt=1000, output=200)
    pace = StepPace(0.01, 1e-6)
    by_slots = measured_profile(0.5, pace, 4, 1e9, lengths)
    assert by_slots == InstanceProfile(1.0, 0.5, 4, 200 * (0.01 + 1e-6 * 4 * 1100))
    by_blocks = measured_profile(0.5, pace, 64, 12_000, lengths)
    assert by_blocks.decode_batch == 10


def test_a_plan_reads_the_same_costs() -> None:
    serving = ServingProfile(
        Quadratic(0.0, 1e-4), Quadratic(0.0, 1e-3), Quadratic(0.0, 1.0), 32, 0.02, 100
    )
    assert planned_profile(serving, 2000) == InstanceProfile(1.0, 2.0, 32, 2.0)
