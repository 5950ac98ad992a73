"""The ratio of prefill to decode instances by eq. 1 on measured speeds, beside the monitor's rule.

The monitor sees that one role is short, not how many instances the load needs. Equation 1 says
that, as far as speeds and lengths are measured. Once the monitor sees that a group is slow, eq. 1's
split is taken, however many instances change for it. Where the present split is the best one, it
stops steps that would lower the rate of the whole group.
Source: P/D-Serve 2.1 (eq. 1), 3.3. Tests: tests/unit/policy/test_profiled_ratio.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.pace import StepPace
from kvmesh.core.types import Role
from kvmesh.policy.pdserve import (
    MIN_PER_ROLE,
    TOLERANCE,
    InstanceProfile,
    RatioReason,
    RatioStep,
    choose_ratio,
    decode_time_s,
    group_rate,
)
from kvmesh.policy.prfaas import ServingProfile


@dataclass(frozen=True, slots=True)
class MeanLengths:
    """Mean lengths of the requests of one window, in tokens.

    Attributes:
        uncached: prompt tokens to compute.
        prompt: prompt tokens.
        output: generated tokens.
    """

    uncached: float
    prompt: float
    output: float


def planned_profile(serving: ServingProfile, uncached_tokens: float) -> InstanceProfile:
    """Returns the batches of a planned instance of each role at home.

    Args:
        serving: costs in the form of PrfaaS's model.
        uncached_tokens: mean prompt tokens to compute.
    """
    decode_s = decode_time_s(0.0, serving.decode_step_s, serving.output_tokens)
    prefill_s = serving.local_prefill_s(uncached_tokens)
    return InstanceProfile(1.0, prefill_s, serving.decode_batch, decode_s)


def measured_profile(
    prefill_s: float, pace: StepPace, slots: float, room_tokens: float, lengths: MeanLengths
) -> InstanceProfile:
    """Returns the batches of an instance of each role under the present load.

    Args:
        prefill_s: seconds to compute a prompt of mean length.
        pace: measured decode steps.
        slots: sequences that a decode instance takes.
        room_tokens: tokens whose KV it holds.
    """
    # On average an answer is half generated.
    context = lengths.prompt + lengths.output / 2
    batch = max(min(slots, room_tokens / max(lengths.prompt + lengths.output, 1.0)), 1.0)
    decode_s = decode_time_s(0.0, pace.of(batch * context), max(lengths.output, 1.0))
    return InstanceProfile(1.0, prefill_s, batch, decode_s)


def step_by_rate(profile: InstanceProfile, num_prefill: int, num_decode: int) -> RatioStep | None:
    """Returns the step to eq. 1's split; None if it is reached, or gains at most `TOLERANCE`."""
    num_instances = num_prefill + num_decode
    if num_instances < 2 * MIN_PER_ROLE:
        return None
    best = choose_ratio(profile, num_instances)
    more = best.num_prefill - num_prefill
    now = group_rate(profile, num_prefill, num_decode)
    if not more or best.rate <= now * (1 + TOLERANCE):
        return None
    return RatioStep(Role.PREFILL if more > 0 else Role.DECODE, RatioReason.BY_RATE, abs(more))


def checked_step(
    step: RatioStep, profile: InstanceProfile, num_prefill: int, num_decode: int
) -> RatioStep:
    """Returns the monitor's step unless the group would serve fewer requests per second with it.

    Differences up to `TOLERANCE` do not count.
    """
    if step.grow is None:
        return step
    now = group_rate(profile, num_prefill, num_decode)
    more = step.count if step.grow is Role.PREFILL else -step.count
    after = group_rate(profile, num_prefill + more, num_decode - more)
    return step if after >= now * (1 - TOLERANCE) else RatioStep(None, RatioReason.AGAINST_RATE)
