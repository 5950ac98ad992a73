"""PrfaaS's long-term reallocation: when to turn a local instance from prefill to decode or back,
and which one.

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
"""Minimum relative gain of a change, so that noise does not move instances back and forth."""


class ReallocationReason(enum.Enum):
    """Why instances change their role, or not."""

    OPTIMAL = "the split is the best one already"
    SMALL_GAIN = "another split gains less than a change costs"
    PREFILL_BOTTLENECK = "prefill makes less than decode can take"
    NO_QUEUE = "nothing waits for the stage that would get an instance"
    DECODE_BOTTLENECK = "decode takes less than prefill makes"


@dataclass(frozen=True, slots=True)
class Reallocation:
    """One instance that changes its role; the threshold is searched anew after every change.

    Attributes:
        to_role: the new role; None: no change.
        gain: rate of the best split over the rate now, minus one.
    """

    to_role: Role | None
    gain: float
    reason: ReallocationReason


@dataclass(frozen=True, slots=True)
class StageQueues:
    """Mean number of requests that waited per instance of each stage since the last evaluation."""

    prefill: float
    decode: float


def plan_reallocation(
    now: OperatingPoint, best: OperatingPoint, queues: StageQueues
) -> Reallocation:
    """Compares the running split with the best one and moves one instance towards it (points 4-5).

    The model uses means only, so the queues have to agree: a stage gets an instance only if more
    requests wait for it than for the other stage.

    Args:
        now: the model at the running threshold and split, with the recent lengths.
        best: the optimum for the same lengths (eqs. 7-8).
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
    """Returns the worker that changes to a role for good: the least used one of the other role.

    None if that is the last of its role, which stays. Hybrid workers are not considered.
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
