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
)

EVEN = InstanceProfile(1, 1.0, 10, 10.0)
"""Both roles serve one request per second and instance."""
UNCLEAR = RatioStep(None, RatioReason.UNCLEAR)


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


def test_where_the_monitor_cannot_tell_the_rate_does() -> None:
    assert checked_step(UNCLEAR, EVEN, 2, 6) == RatioStep(Role.PREFILL, RatioReason.BY_RATE)
    assert checked_step(UNCLEAR, EVEN, 6, 2) == RatioStep(Role.DECODE, RatioReason.BY_RATE)
    assert checked_step(UNCLEAR, EVEN, 4, 4) == UNCLEAR
    assert checked_step(UNCLEAR, EVEN, 1, 2) == UNCLEAR  # too few for two of each
    steady = RatioStep(None, RatioReason.STEADY)
    assert checked_step(steady, EVEN, 2, 6) == steady


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
