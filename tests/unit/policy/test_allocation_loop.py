from __future__ import annotations

import math

import pytest

from kvmesh.core.types import Role
from kvmesh.policy.allocation_loop import MIN_LENGTHS, AllocationLoop
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.offload import Threshold
from kvmesh.policy.prfaas import Hardware, ServingProfile
from kvmesh.policy.reallocation import ReallocationReason
from kvmesh.policy.waiting import Waiting


class TestAllocation:
    SERVING = ServingProfile(
        remote_prefill_s=Quadratic(0.0, 1e-4),
        local_prefill_s=Quadratic(0.0, 1e-3),
        kv_bytes=Quadratic(0.0, 1e3),
        decode_batch=8,
        decode_step_s=0.01,
        output_tokens=1.0,
    )

    def loop(self, length: int = 1000, output: float = 10.0) -> AllocationLoop:
        made = AllocationLoop()
        for _ in range(MIN_LENGTHS):
            made.note_prompt(length, output)
        return made

    def test_needs_prompts(self) -> None:
        loop = AllocationLoop()
        loop.note_prompt(5, 5)
        assert not loop.has_lengths
        assert self.loop().has_lengths

    def test_moves_towards_what_waits(self) -> None:
        """A second of prefill and an eightieth of decode: two of six are too few for prefill."""
        loop = self.loop()
        loop.observe(Waiting(6, 0))
        queues = loop.take_queues(2, 4)
        assert queues.prefill == pytest.approx(3)
        question = loop.question(
            self.SERVING, Hardware(0, 6, 0.0), Threshold(float("inf"), float("inf")), 2, queues
        )
        move = question.answer().move
        assert (move.to_role, move.reason) == (Role.PREFILL, ReallocationReason.PREFILL_BOTTLENECK)

    def test_threshold_keeps_its_lift(self) -> None:
        loop = self.loop()
        queues = loop.take_queues(2, 4)
        before = Threshold(500.0, 1000.0)
        found = loop.question(self.SERVING, Hardware(2, 6, 1e9), before, 2, queues).answer()
        after = found.threshold(before, 2)
        assert after.tokens == pytest.approx(2 * after.base_tokens)

    def test_the_first_threshold_that_is_found_is_a_number(self) -> None:
        """Until then nothing is offloaded: the threshold is endless."""
        loop = self.loop()
        before = Threshold(math.inf, math.inf)
        queues = loop.take_queues(2, 4)
        found = loop.question(self.SERVING, Hardware(2, 6, 1e9), before, 2, queues).answer()
        after = found.threshold(before, 2)
        assert after.tokens == after.base_tokens < math.inf
