"""PrfaaS's long-term decisions, every few minutes: base threshold and allocation of instances. The
scheduler and the simulator both use this loop.

The loop keeps observations and decides; its owner measures, waits and carries out.
Source: PrfaaS 3.4.3 points 4-5, which re-solve eqs. 7-8.
Tests: tests/unit/policy/test_allocation_loop.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.core.types import Role, WorkerInfo, WorkerLoad
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.offload import Threshold
from kvmesh.policy.prfaas import (
    Hardware,
    OperatingPoint,
    ServingProfile,
    operating_point,
    optimum,
    search,
    threshold_grid,
)
from kvmesh.policy.reallocation import Reallocation, StageQueues, plan_reallocation
from kvmesh.policy.role_loop import decode_slots
from kvmesh.policy.token_pace import KEPT_SHARE
from kvmesh.policy.waiting import Waiting

REALLOCATE_S = 120.0
"""Seconds between two evaluations of lengths, base threshold and allocation."""

LENGTHS_WINDOW = 2000
"""Number of the latest prompts whose lengths are kept."""

MIN_LENGTHS = 400
"""Minimum number of prompts for an evaluation. The deviation of lengths is about as large as their
mean, so the mean of fewer has an error larger than the gain that is worth a change."""

GRID_POINTS = 200
"""Number of quantiles of the lengths that an evaluation tries as thresholds."""

MAX_STEPS = 8
"""Largest distance in instances from the present split that is searched: an evaluation moves
one."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Result of one evaluation.

    Attributes:
        move: the instance to move, if any.
        points: the operating points that were searched.
    """

    move: Reallocation
    points: tuple[OperatingPoint, ...]

    def threshold(self, before: Threshold, num_prefill: int) -> Threshold:
        """Returns the best threshold for a split, raised by the same factor as the one before.

        The fast loop (`threshold_loop.py`) brings it back to the base, or lowers it where needed.
        """
        best = optimum(p for p in self.points if p.num_prefill == num_prefill)
        base = best.threshold_tokens
        # An infinite threshold cannot be raised, and infinity / infinity is not a number.
        is_finite = math.isfinite(before.base_tokens)
        lift = max(before.tokens / max(before.base_tokens, 1.0), 1.0) if is_finite else 1.0
        return Threshold(base, base * lift)


class AllocationLoop:
    """PrfaaS's slow loop: collects recent lengths and queues, and poses the model's question."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=LENGTHS_WINDOW)
        self._outputs: deque[float] = deque(maxlen=LENGTHS_WINDOW)
        self._waiting: list[Waiting] = []

    @property
    def has_lengths(self) -> bool:
        """Whether enough prompts were seen to trust their mean."""
        return len(self._lengths) >= MIN_LENGTHS

    def note_prompt(self, uncached_tokens: int, output_tokens: float) -> None:
        """Adds a prompt to the distribution of lengths.

        Args:
            output_tokens: number of tokens that it generates, or the best guess.
        """
        self._lengths.append(max(uncached_tokens, 1))
        self._outputs.append(output_tokens)

    def observe(self, waiting: Waiting) -> None:
        """Adds a sample of the queues; called once per cycle."""
        self._waiting.append(waiting)

    def take_queues(self, num_prefill: int, num_decode: int) -> StageQueues:
        """Returns the mean queues per instance since the last call, and clears the samples."""
        count = max(len(self._waiting), 1)
        queues = StageQueues(
            sum(each.prefill for each in self._waiting) / count / max(num_prefill, 1),
            sum(each.decode for each in self._waiting) / count / max(num_decode, 1),
        )
        self._waiting.clear()
        return queues

    def question(
        self,
        serving: ServingProfile,
        hardware: Hardware,
        threshold: Threshold,
        workers: Sequence[tuple[WorkerInfo, WorkerLoad]],
        queues: StageQueues,
    ) -> AllocationQuestion:
        """Returns the inputs of an evaluation, with the recent prompts.

        Args:
            serving: measured costs; its `output_tokens` are replaced by the observed mean, and its
                batch by what TPOT limits leave of it.
            workers: local instances now.
            queues: from `take_queues`.
        """
        output = max(sum(self._outputs) / len(self._outputs), 1.0)
        num_prefill = sum(info.role is Role.PREFILL for info, _ in workers)
        return AllocationQuestion(
            dataclasses.replace(within_limits(serving, workers), output_tokens=output),
            tuple(self._lengths),
            hardware,
            threshold,
            num_prefill,
            queues,
        )


def within_limits(
    serving: ServingProfile, workers: Iterable[tuple[WorkerInfo, WorkerLoad]]
) -> ServingProfile:
    """Returns the costs with the largest batch that keeps the TPOT limits (BS_max of eq. 5).

    Unchanged where no limit makes batches smaller. A step of such a batch takes `KEPT_SHARE` of the
    strictest limit, by definition.
    """
    limited = [
        (decode_slots(info, load), KEPT_SHARE * load.room.strictest_s)
        for info, load in workers
        if load.decode_running and math.isfinite(load.room.strictest_s)
    ]
    if not limited:
        return serving
    batch = sum(slots for slots, _ in limited) / len(limited)
    if batch >= serving.decode_batch:
        return serving
    rate = sum(slots / step_s for slots, step_s in limited) / len(limited)
    return dataclasses.replace(serving, decode_batch=batch, decode_step_s=batch / rate)


@dataclass(frozen=True, slots=True)
class AllocationQuestion:
    """All inputs of one evaluation; it shares no state, so another thread may answer it."""

    serving: ServingProfile
    lengths: tuple[int, ...]
    hardware: Hardware
    threshold: Threshold
    num_prefill: int
    queues: StageQueues

    def is_open(self, *, switch_roles: bool) -> bool:
        """Whether the model decides anything that measured loads do not.

        Without an offload cluster there is no threshold, and role switching follows the loads
        within seconds: the model's moves on top of it bring nothing (docs/evaluation.md).
        """
        return not switch_roles or self.hardware.num_remote > 0

    def answer(self) -> Allocation:
        """Compares the running split with the best one for these prompts."""
        lengths = LengthDistribution(self.lengths)
        low = max(self.num_prefill - MAX_STEPS, 0)
        high = min(self.num_prefill + MAX_STEPS, self.hardware.num_local)
        grid = threshold_grid(lengths, GRID_POINTS)
        points = search(self.serving, lengths, self.hardware, grid, range(low, high + 1))
        now = operating_point(
            self.serving, lengths, self.hardware, self.threshold.base_tokens, self.num_prefill
        )
        return Allocation(plan_reallocation(now, optimum(points), self.queues), tuple(points))
