from __future__ import annotations

import pytest

from kvmesh.core.types import Role
from kvmesh.policy.pdserve import (
    Group,
    GroupReason,
    InstanceProfile,
    LatencyWindow,
    RatioReason,
    TimeoutTier,
    choose_group,
    choose_ratio,
    decode_time_s,
    ratio_direction,
    timeout_s,
)

# 2 requests per second of prefill and 1 of decode per instance.
PROFILE = InstanceProfile(prefill_batch=4, prefill_s=2, decode_batch=20, decode_s=20)


class TestRatio:
    def test_eq_1_balances_the_stages(self) -> None:
        choice = choose_ratio(PROFILE, 12)
        assert (choice.num_prefill, choice.num_decode) == (4, 8)
        assert choice.rate == 8

    def test_a_minimum_of_each_role_is_kept(self) -> None:
        slow_decode = InstanceProfile(1, 0.01, 1, 10)
        choice = choose_ratio(slow_decode, 6)
        assert (choice.num_prefill, choice.num_decode) == (2, 4)

    @pytest.mark.parametrize("prefill_s", [0.25, 0.8, 3.0])
    @pytest.mark.parametrize("num_instances", [4, 5, 7, 12])
    def test_no_other_split_serves_more(self, prefill_s: float, num_instances: int) -> None:
        profile = InstanceProfile(1, prefill_s, 1, 1)
        counts = range(2, num_instances - 1)
        rates = [min(n / prefill_s, num_instances - n) for n in counts]
        choice = choose_ratio(profile, num_instances)
        assert choice.rate == pytest.approx(max(rates))
        assert choice.num_prefill == counts[rates.index(max(rates))]

    def test_too_few_instances(self) -> None:
        with pytest.raises(ValueError, match="3 instances"):
            choose_ratio(PROFILE, 3)

    def test_decode_time(self) -> None:
        assert decode_time_s(0.1, 0.02, 100) == pytest.approx(2.1)


class TestMonitor:
    BEFORE = LatencyWindow(prefill_s=1.0, total_s=10.0)

    @pytest.mark.parametrize(
        ("now", "grow", "reason"),
        [
            (LatencyWindow(4.0, 13.0), Role.PREFILL, RatioReason.PREFILL_GREW),
            (LatencyWindow(1.0, 13.0), Role.DECODE, RatioReason.DECODE_GREW),
            (LatencyWindow(1.3, 13.0), None, RatioReason.UNCLEAR),
            (LatencyWindow(4.0, 10.5), None, RatioReason.STEADY),
            (LatencyWindow(0.5, 5.0), None, RatioReason.STEADY),
        ],
    )
    def test_directions(self, now: LatencyWindow, grow: Role | None, reason: RatioReason) -> None:
        step = ratio_direction(self.BEFORE, now, num_prefill=4, num_decode=4)
        assert (step.grow, step.reason) == (grow, reason)

    def test_a_first_window_in_which_nothing_took_time_is_steady(self) -> None:
        step = ratio_direction(LatencyWindow(0.0, 0.0), LatencyWindow(4.0, 13.0), 4, 4)
        assert (step.grow, step.reason) == (None, RatioReason.STEADY)

    def test_the_giving_role_keeps_two(self) -> None:
        step = ratio_direction(self.BEFORE, LatencyWindow(4.0, 13.0), 4, 2)
        assert (step.grow, step.reason) == (None, RatioReason.AT_MINIMUM)


@pytest.mark.parametrize(("tokens", "limit"), [(1, 1.0), (1000, 1.0), (1001, 5.0), (99_999, 5.0)])
def test_longer_prompts_may_wait_longer(tokens: int, limit: float) -> None:
    assert timeout_s(tokens, [TimeoutTier(1000, 1.0), TimeoutTier(8000, 5.0)]) == limit


class TestGroups:
    GROUPS = (Group("a", "chat", 0.9), Group("b", "chat", 0.2), Group("c", "", 0.0))

    def test_the_least_busy_one_of_the_scenario(self) -> None:
        choice = choose_group("chat", self.GROUPS)
        assert choice.group == self.GROUPS[1]
        assert choice.reason is GroupReason.SCENARIO

    def test_a_general_group_serves_the_rest(self) -> None:
        choice = choose_group("code", self.GROUPS)
        assert choice.group == self.GROUPS[2]
        assert choice.reason is GroupReason.GENERAL

    def test_nobody_serves_it(self) -> None:
        choice = choose_group("code", self.GROUPS[:2])
        assert (choice.group, choice.reason) == (None, GroupReason.NONE)
