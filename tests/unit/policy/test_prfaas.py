from __future__ import annotations

import dataclasses
import math

import pytest

from kvmesh.core.types import Role
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import (
    Hardware,
    Limit,
    ServingProfile,
    operating_point,
    optimum,
    search,
    threshold_grid,
)
from kvmesh.policy.reallocation import ReallocationReason, StageQueues, plan_reallocation

PROFILE = ServingProfile(
    remote_prefill_s=Quadratic(0.1, 1e-4),
    local_prefill_s=Quadratic(0.2, 2e-4),
    kv_bytes=Quadratic(1e6, 1000.0),
    decode_batch=20,
    decode_step_s=0.02,
    output_tokens=500,
)
LENGTHS = LengthDistribution([1000, 3000, 9000, 27_000])
HARDWARE = Hardware(num_remote=2, num_local=6, egress_bytes_per_s=1e12)


def test_the_equations_by_hand() -> None:
    """Half of the requests are above 3000: their mean is 18000 tokens, of the others 2000."""
    point = operating_point(PROFILE, LENGTHS, HARDWARE, 3000, num_prefill=2)
    assert (point.share_remote, point.long_tokens, point.short_tokens) == (0.5, 18_000, 2000)
    assert point.remote_rate == pytest.approx(2 / 1.9)
    assert point.local_rate == pytest.approx(2 / 0.6)
    assert point.decode_rate == pytest.approx(4 * 20 / (0.02 * 500))
    assert point.rate == pytest.approx(2 / 1.9 / 0.5)
    assert point.limit is Limit.REMOTE_COMPUTE
    assert point.egress_bytes_per_s == pytest.approx(2 / 1.9 * 19e6)


def test_a_thin_link_limits_the_remote_cluster() -> None:
    thin = dataclasses.replace(HARDWARE, egress_bytes_per_s=9.5e6)
    point = operating_point(PROFILE, LENGTHS, thin, 3000, num_prefill=2)
    assert point.limit is Limit.EGRESS
    assert point.rate == pytest.approx(9.5e6 / 19e6 / 0.5)
    assert point.egress_bytes_per_s == pytest.approx(9.5e6)


@pytest.mark.parametrize(
    ("threshold", "num_prefill", "limit"),
    [(math.inf, 2, Limit.LOCAL_PREFILL), (0, 0, Limit.REMOTE_COMPUTE), (3000, 6, Limit.DECODE)],
)
def test_ends_of_the_grid(threshold: float, num_prefill: int, limit: Limit) -> None:
    point = operating_point(PROFILE, LENGTHS, HARDWARE, threshold, num_prefill)
    assert point.limit is limit
    assert math.isfinite(point.rate)


def test_no_remote_cluster_keeps_everything_at_home() -> None:
    alone = Hardware(0, 6, 0.0)
    best = optimum(search(PROFILE, LENGTHS, alone))
    assert best.share_remote == 0
    assert best.rate == max(
        operating_point(PROFILE, LENGTHS, alone, math.inf, n).rate for n in range(7)
    )


def test_grid_spans_from_all_to_none() -> None:
    grid = threshold_grid(LENGTHS)
    assert (grid[0], grid[-1]) == (0, math.inf)
    assert {1000, 3000, 9000, 27_000} <= set(grid)
    assert grid == sorted(grid)


class TestReallocation:
    def test_moves_towards_the_best_split(self) -> None:
        points = search(PROFILE, LENGTHS, HARDWARE)
        best = optimum(points)
        for num_prefill in range(7):
            now = optimum(p for p in points if p.num_prefill == num_prefill)
            queues = StageQueues(3.0, 1.0) if num_prefill < best.num_prefill else StageQueues(0, 1)
            move = plan_reallocation(now, best, queues)
            if num_prefill == best.num_prefill:
                assert (move.to_role, move.reason) == (None, ReallocationReason.OPTIMAL)
            elif best.rate < 1.05 * now.rate:
                assert (move.to_role, move.reason) == (None, ReallocationReason.SMALL_GAIN)
            else:
                grows = num_prefill < best.num_prefill
                assert move.to_role is (Role.PREFILL if grows else Role.DECODE)
                assert move.gain > 0

    def test_a_stalled_split_moves_whatever_the_gain(self) -> None:
        stalled = operating_point(PROFILE, LENGTHS, HARDWARE, math.inf, 0)
        best = optimum(search(PROFILE, LENGTHS, HARDWARE))
        assert stalled.rate == 0
        assert plan_reallocation(stalled, best, StageQueues(1, 0)).to_role is Role.PREFILL

    @pytest.mark.parametrize("queues", [StageQueues(0, 0), StageQueues(1, 5)])
    def test_the_queues_must_agree(self, queues: StageQueues) -> None:
        stalled = operating_point(PROFILE, LENGTHS, HARDWARE, math.inf, 0)
        move = plan_reallocation(stalled, optimum(search(PROFILE, LENGTHS, HARDWARE)), queues)
        assert (move.to_role, move.reason) == (None, ReallocationReason.NO_QUEUE)
