"""PrfaaS's slow time scale: when to turn a local instance from prefill to decode or
back, and which one.

Source: PrfaaS 3.4.3, points 4-5. Tests: tests/unit/policy/test_prfaas.py,
tests/unit/policy/test_reallocation.py.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.prfaas import OperatingPoint

MIN_GAIN = 0.05
"""Smaller gains are left alone, so that noise does not turn instances to and fro."""


class ReallocationReason(enum.Enum):
    """Why instances change their role, or not."""

    OPTIMAL = "the split is the best one already"
    SMALL_GAIN = "another split gains less than a change costs"
    PREFILL_BOTTLENECK = "prefill makes less than decode can take"
    NO_QUEUE = "nothing waits for the stage that would get an instance"
    DECODE_BOTTLENECK = "decode takes less than prefill makes"


@dataclass(frozen=True, slots=True)
class Reallocation:
    """One instance to turn; the threshold is searched anew after every change.

    Attributes:
        to_role: None leaves all as they are.
        gain: rate of the best split over the rate now, minus one.
    """

    to_role: Role | None
    gain: float
    reason: ReallocationReason


@dataclass(frozen=True, slots=True)
class StageQueues:
    """Requests that waited for an instance of each stage, mean since the last evaluation."""

    prefill: float
    decode: float


def plan_reallocation(
    now: OperatingPoint, best: OperatingPoint, queues: StageQueues
) -> Reallocation:
    """Compares the running split with the best one and moves one instance towards it.

    The model knows means only, so the queues have to agree: a stage gets an instance only if
    requests wait for it more than for the other.

    Args:
        now: the model at the running threshold and split, with the lengths of late.
        best: the optimum for the same lengths.
    """
    gain = best.rate / now.rate - 1.0 if now.rate > 0 else float("inf")
    if best.num_prefill == now.num_prefill:
        return Reallocation(None, gain, ReallocationReason.OPTIMAL)
    if gain < MIN_GAIN:
        return Reallocation(None, gain, ReallocationReason.SMALL_GAIN)
    to_prefill = best.num_prefill > now.num_prefill
    more, less = (queues.prefill, queues.decode) if to_prefill else (queues.decode, queues.prefill)
    if more <= less:
        return Reallocation(None, gain, ReallocationReason.NO_QUEUE)
    if to_prefill:
        return Reallocation(Role.PREFILL, gain, ReallocationReason.PREFILL_BOTTLENECK)
    return Reallocation(Role.DECODE, gain, ReallocationReason.DECODE_BOTTLENECK)


def choose_giver(
    workers: Iterable[tuple[WorkerInfo, WorkerLoad]], to_role: Role
) -> WorkerId | None:
    """The worker that is to take a role for good: the least used one of the other role.

    None if that is its last one, which stays. Hybrid workers have no other role.
    """
    givers = [
        (_used_share(info, load), info.worker_id)
        for info, load in workers
        if info.role not in (Role.HYBRID, to_role)
    ]
    return min(givers)[1] if len(givers) > 1 else None


def _used_share(info: WorkerInfo, load: WorkerLoad) -> float:
    if info.role is Role.PREFILL:
        return load.prefill_active / max(info.prefill_slots, 1)
    return load.decode_running / max(info.decode_slots, 1)
