"""Steps in progress in a simulated worker: a run of decode steps, or one step with prompts.

Tests: tests/unit/sim/test_worker.py, tests/unit/sim/test_host.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmesh.sim.requests import SimSequence


class DecodeRun:
    """Decode steps in progress, of one batch: each takes `growth_s` more than the one before.

    Attributes:
        started_at: start time of the first of `num_steps` steps.
        first_s: seconds of the first step.
    """

    __slots__ = ("first_s", "growth_s", "num_steps", "started_at")

    def __init__(self, started_at: float, first_s: float, growth_s: float, num_steps: int) -> None:
        self.started_at = started_at
        self.first_s = first_s
        self.growth_s = growth_s
        self.num_steps = num_steps

    def seconds(self, count: int) -> float:
        """Returns the seconds of the first `count` steps together."""
        return count * (self.first_s + self.growth_s * (count - 1) / 2)

    def num_over(self, now: float) -> int:
        """Returns the steps that ended before `now`, without the last one, whose end is an
        event.
        """
        elapsed = now - self.started_at
        if elapsed <= self.first_s:
            return 0
        # Solves `seconds(count) == elapsed`, in a form that also holds for a growth of 0.
        half = self.first_s - self.growth_s / 2
        count = 2 * elapsed / (half + math.sqrt(half * half + 2 * self.growth_s * elapsed))
        return min(max(math.ceil(count - 1e-9) - 1, 0), self.num_steps - 1)

    def take(self, count: int) -> None:
        """Removes the first `count` steps, which the caller has counted."""
        self.started_at += self.seconds(count)
        self.first_s += self.growth_s * count
        self.num_steps -= count


@dataclass(slots=True)
class MixedStep:
    """A step with chunks of prompts, in progress.

    Attributes:
        chunks: prompts, and how many of their tokens are computed.
        decodes: whether the decoding sequences take part.
        chunks_s, decode_s: seconds of both parts on a host of their own.
        stretched_s: seconds of both on the shared host, if its other workers stay as they are.
    """

    chunks: list[tuple[SimSequence, int]]
    decodes: bool
    chunks_s: float
    decode_s: float
    started_at: float
    ends_at: float
    stretched_s: float
