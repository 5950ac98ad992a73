"""Threshold and allocation every few minutes, for the scheduler and the simulator alike.

The loop keeps what it has seen and decides; whoever owns it measures, waits and carries out.
Source: PrfaaS 3.4.3. Tests: tests/unit/policy/test_allocation_loop.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass

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
from kvmesh.policy.waiting import Waiting

REALLOCATE_S = 120.0
"""Slow scale: lengths, base threshold and allocation."""

LENGTHS_WINDOW = 2000
MIN_LENGTHS = 400
"""Lengths scatter about as much as their mean is long: the mean of fewer is off by more than the
gain that is worth a change."""

GRID_POINTS = 200
MAX_STEPS = 8
"""Splits that are further away than this are not searched: an evaluation moves one instance."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one evaluation found.

    Attributes:
        points: the operating points that were searched.
    """

    move: Reallocation
    points: tuple[OperatingPoint, ...]

    def threshold(self, before: Threshold, num_prefill: int) -> Threshold:
        """The threshold for a split, raised as much as the one before was.

        The fast loop brings it back to the base, and lowers it again where that is needed.
        """
        best = optimum(p for p in self.points if p.num_prefill == num_prefill)
        base = best.threshold_tokens
        # Of an endless one nothing can be raised, and infinity by infinity is no number.
        is_finite = math.isfinite(before.base_tokens)
        lift = max(before.tokens / max(before.base_tokens, 1.0), 1.0) if is_finite else 1.0
        return Threshold(base, base * lift)


class AllocationLoop:
    """PrfaaS's slow scale: lengths and queues of late, and what the model makes of them."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=LENGTHS_WINDOW)
        self._outputs: deque[float] = deque(maxlen=LENGTHS_WINDOW)
        self._waiting: list[Waiting] = []

    @property
    def has_lengths(self) -> bool:
        """Whether enough prompts were seen to trust their mean."""
        return len(self._lengths) >= MIN_LENGTHS

    def note_prompt(self, uncached_tokens: int, output_tokens: float) -> None:
        """Takes a prompt into the distribution.

        Args:
            output_tokens: that it generates, or the best guess.
        """
        self._lengths.append(max(uncached_tokens, 1))
        self._outputs.append(output_tokens)

    def observe(self, waiting: Waiting) -> None:
        """Takes a sample of the queues; one per cycle."""
        self._waiting.append(waiting)

    def take_queues(self, num_prefill: int, num_decode: int) -> StageQueues:
        """Mean queues per instance since the last call."""
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
        num_prefill: int,
        queues: StageQueues,
    ) -> AllocationQuestion:
        """What is to be compared, with the prompts of late.

        Args:
            serving: its `output_tokens` are replaced by those that were seen.
            num_prefill: local prefill instances now.
            queues: from `take_queues`.
        """
        output = max(sum(self._outputs) / len(self._outputs), 1.0)
        return AllocationQuestion(
            dataclasses.replace(serving, output_tokens=output),
            tuple(self._lengths),
            hardware,
            threshold,
            num_prefill,
            queues,
        )


@dataclass(frozen=True, slots=True)
class AllocationQuestion:
    """All that one evaluation reads; it shares nothing, so another thread may answer it."""

    serving: ServingProfile
    lengths: tuple[int, ...]
    hardware: Hardware
    threshold: Threshold
    num_prefill: int
    queues: StageQueues

    def answer(self) -> Allocation:
        """Compares the split that runs with the best one for these prompts."""
        lengths = LengthDistribution(self.lengths)
        low = max(self.num_prefill - MAX_STEPS, 0)
        high = min(self.num_prefill + MAX_STEPS, self.hardware.num_local)
        grid = threshold_grid(lengths, GRID_POINTS)
        points = search(self.serving, lengths, self.hardware, grid, range(low, high + 1))
        now = operating_point(
            self.serving, lengths, self.hardware, self.threshold.base_tokens, self.num_prefill
        )
        return Allocation(plan_reallocation(now, optimum(points), self.queues), tuple(points))
