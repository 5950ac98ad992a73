"""P/D-Serve's decisions: the ratio of prefill to decode instances, the direction in which to change
it, how long a request may wait, and the group that serves it.

Source: P/D-Serve 2.1 (model, eqs. 1-2), 3.2 (groups), 3.3 (triggers), 3.5 (timeouts).
Tests: tests/unit/policy/test_pdserve.py, tests/property/test_policy_properties.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.types import Role

TOLERANCE = 0.1
"""Relative change of a latency or share up to which it counts as unchanged (3.3)."""

MIN_PER_ROLE = 2
"""Minimum number of instances of a role: a single one would be a single point of failure (3.3)."""


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """Measured batches of one instance of each role under one scenario's traffic (2.1).

    Attributes:
        prefill_batch, decode_batch: requests in one batch (b_p, b_d).
        prefill_s, decode_s: seconds of one such batch (T_p, T_d).
    """

    prefill_batch: float
    prefill_s: float
    decode_batch: float
    decode_s: float

    @property
    def prefill_rate(self) -> float:
        """Requests per second of a prefill instance, b_p / T_p."""
        return self.prefill_batch / self.prefill_s

    @property
    def decode_rate(self) -> float:
        """Requests per second of a decode instance, b_d / T_d."""
        return self.decode_batch / self.decode_s


def decode_time_s(transfer_s: float, tpot_s: float, num_generated: float) -> float:
    """Returns T_d: the KV transfer, then one step per generated token (2.1)."""
    return transfer_s + tpot_s * num_generated


@dataclass(frozen=True, slots=True)
class RatioChoice:
    """A split of instances.

    Attributes:
        rate: requests per second of the whole group.
    """

    num_prefill: int
    num_decode: int
    rate: float


def choose_ratio(
    profile: InstanceProfile, num_instances: int, min_per_role: int = MIN_PER_ROLE
) -> RatioChoice:
    """Returns the split of highest throughput, from eq. 1: n_p * b_p / T_p = n_d * b_d / T_d.

    The rate rises with n_p up to the balance and falls beyond it, so the best n_p is one of the two
    integers next to the balance.

    Raises:
        ValueError: there are too few instances for `min_per_role` of both roles.
    """
    if num_instances < 2 * min_per_role:
        raise ValueError(f"{num_instances} instances are not {min_per_role} of both roles")
    share = profile.decode_rate / (profile.prefill_rate + profile.decode_rate)
    balance = math.floor(num_instances * share)
    last = num_instances - min_per_role
    near = {min(max(count, min_per_role), last) for count in (balance, balance + 1)}
    options = [_split(profile, count, num_instances - count) for count in sorted(near)]
    return max(options, key=lambda option: option.rate)


def group_rate(profile: InstanceProfile, num_prefill: int, num_decode: int) -> float:
    """Returns the requests per second of a group: those of its slower role."""
    return min(num_prefill * profile.prefill_rate, num_decode * profile.decode_rate)


def _split(profile: InstanceProfile, num_prefill: int, num_decode: int) -> RatioChoice:
    return RatioChoice(num_prefill, num_decode, group_rate(profile, num_prefill, num_decode))


# --- the monitor (3.3) ---------------------------------------------------------------------------


class RatioReason(enum.Enum):
    """Why the monitor wants another ratio, or not."""

    STEADY = "latency has not risen"
    PREFILL_GREW = "latency rose and the prefill share with it"
    DECODE_GREW = "latency rose and the prefill share fell"
    UNCLEAR = "latency rose and the prefill share stayed"
    AT_MINIMUM = "the other role has no instance to spare"
    SETTLING = "the change before is to show first"
    HOLD = "the change before made it no worse"
    TAKEN_BACK = "the change before made it worse"
    BY_RATE = "latency rose, and by eq. 1 this role limits the group"
    AGAINST_RATE = "by eq. 1 the group would serve less"


@dataclass(frozen=True, slots=True)
class LatencyWindow:
    """Mean latencies over one window of one scenario.

    Attributes:
        prefill_s: time to the first token, T_p.
        total_s: time to the last token, E2E.
    """

    prefill_s: float
    total_s: float

    @property
    def prefill_share(self) -> float:
        """T_p / E2E."""
        return self.prefill_s / self.total_s if self.total_s else 0.0


@dataclass(frozen=True, slots=True)
class RatioStep:
    """Instances to move.

    Attributes:
        grow: the role that gets them; None leaves the ratio alone.
        count: number of instances.
    """

    grow: Role | None
    reason: RatioReason
    count: int = 1


def ratio_direction(
    before: LatencyWindow,
    now: LatencyWindow,
    num_prefill: int,
    num_decode: int,
    tolerance: float = TOLERANCE,
) -> RatioStep:
    """Applies the monitor's rule (3.3) to two windows.

    If latency and prefill share both rise, prefill gets an instance; if latency rises and the share
    falls, decode does. One instance moves per call, and the giving role keeps `MIN_PER_ROLE`.

    Args:
        tolerance: relative change up to which a latency or share counts as unchanged.
    """
    slower = _relative(before.total_s, now.total_s)
    shift = _share_shift(before.prefill_share, now.prefill_share)
    if slower <= tolerance:
        return RatioStep(None, RatioReason.STEADY)
    if abs(shift) <= tolerance:
        return RatioStep(None, RatioReason.UNCLEAR)
    grow = Role.PREFILL if shift > 0 else Role.DECODE
    if (num_decode if grow is Role.PREFILL else num_prefill) <= MIN_PER_ROLE:
        return RatioStep(None, RatioReason.AT_MINIMUM)
    reason = RatioReason.PREFILL_GREW if shift > 0 else RatioReason.DECODE_GREW
    return RatioStep(grow, reason)


def _relative(before: float, now: float) -> float:
    return (now - before) / before if before else 0.0


def _share_shift(before: float, now: float) -> float:
    """Returns the change of a share relative to share * (1 - share).

    A share close to 1 cannot grow by a tenth of itself, so its distance to 1 counts too.
    """
    room = before * (1.0 - before)
    return (now - before) / room if room else 0.0


# --- waiting (3.5) and groups (3.2) --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimeoutTier:
    """Prompts of up to `max_tokens` may wait for their first token for `timeout_s`."""

    max_tokens: int
    timeout_s: float


def timeout_s(num_tokens: int, tiers: Sequence[TimeoutTier]) -> float:
    """Returns the seconds that a prompt may wait before early intervention ends it (3.5).

    Args:
        tiers: at least one, by rising length; the last one also covers all longer prompts.
    """
    return next(
        (tier.timeout_s for tier in tiers if num_tokens <= tier.max_tokens), tiers[-1].timeout_s
    )


class GroupReason(enum.Enum):
    """Why a group was chosen."""

    SCENARIO = "serves the scenario"
    GENERAL = "no group serves the scenario, this one serves any"
    NONE = "no group serves the scenario and none is general"


@dataclass(frozen=True, slots=True)
class Group:
    """A P/D group.

    Attributes:
        scenario: the scenario that it serves; empty for any.
        busy_share: fraction of its prefill slots in use, 0..1.
    """

    name: str
    scenario: str
    busy_share: float


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """The group of a request and why; None if no group serves it."""

    group: Group | None
    reason: GroupReason


def choose_group(scenario: str, groups: Sequence[Group]) -> GroupChoice:
    """Returns the least busy group of the scenario, else the least busy general one (3.2)."""
    for label, reason in ((scenario, GroupReason.SCENARIO), ("", GroupReason.GENERAL)):
        found = [group for group in groups if group.scenario == label]
        if found:
            return GroupChoice(min(found, key=lambda group: (group.busy_share, group.name)), reason)
    return GroupChoice(None, GroupReason.NONE)
