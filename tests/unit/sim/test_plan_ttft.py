from __future__ import annotations

import dataclasses

import pytest

from kvmesh.policy.curves import Quadratic
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.prfaas import Hardware, OperatingPoint, ServingProfile, operating_point
from kvmesh.sim.plan_ttft import IN_TIME, Queue, queue, rate_in_time, share_in_time

PROFILE = ServingProfile(
    remote_prefill_s=Quadratic(0.1, 1e-4),
    local_prefill_s=Quadratic(0.0, 1e-3),
    kv_bytes=Quadratic(1e6, 1000.0),
    decode_batch=50,
    decode_step_s=0.02,
    output_tokens=50,
)
ALONE = Hardware(0, 2, 0.0)
EQUAL = LengthDistribution([1000])
"""A second each."""


def point(hardware: Hardware = ALONE, threshold: float = float("inf")) -> OperatingPoint:
    return operating_point(PROFILE, EQUAL, hardware, threshold, 1)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    even = queue(1, 0.5, [1.0, 1.0])
    assert even.chance == pytest.approx(0.5)
    assert even.chance * even.wait_s == pytest.approx(0.5)  # rho / (2 (1 - rho)) of a service
    uneven = queue(1, 0.5, [0.0, 2.0])
    assert uneven.wait_s == pytest.approx(2 * even.wait_s)


def test_erlang_c_by_hand() -> None:
    """Two servers at load 1: a third of the arrivals waits."""
    assert Queue(2, 1.0, 1.0, 1.0).chance == pytest.approx(1 / 3)


def test_fewer_are_in_time_the_more_come_and_none_beyond_the_capacity() -> None:
    shares = [
        share_in_time(PROFILE, EQUAL, ALONE, point(), rate, 3.0) for rate in (0.1, 0.5, 0.9, 1.1)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert shares[-1] == 0.0


def test_the_rate_is_where_the_share_is_just_kept() -> None:
    rate = rate_in_time(PROFILE, EQUAL, ALONE, point(), 3.0)
    assert 0.0 < rate < point().rate
    share = share_in_time(PROFILE, EQUAL, ALONE, point(), rate, 3.0)
    assert share == pytest.approx(IN_TIME, abs=0.01)
    assert rate_in_time(PROFILE, EQUAL, ALONE, point(), 30.0) > rate


def test_a_lone_prompt_that_is_late_has_no_rate() -> None:
    assert rate_in_time(PROFILE, EQUAL, ALONE, point(), 0.9) == 0.0


def test_slots_that_are_held_by_prompts_are_not_free_for_others() -> None:
    few = dataclasses.replace(PROFILE, decode_batch=2, decode_step_s=0.001)
    made = operating_point(few, EQUAL, ALONE, float("inf"), 1)
    assert made.rate == pytest.approx(1.0), "the model does not see it"
    assert rate_in_time(few, EQUAL, ALONE, made, 1e6) < 0.9


def test_both_sides_count_by_their_share() -> None:
    lengths = LengthDistribution([1000] * 9 + [100_000])
    both = Hardware(1, 2, 1e12)
    made = operating_point(PROFILE, lengths, both, 50_000, 1)
    share = share_in_time(PROFILE, lengths, both, made, 0.01, 5.0)
    assert share == pytest.approx(0.9, abs=0.02), "long ones take 10 s"
