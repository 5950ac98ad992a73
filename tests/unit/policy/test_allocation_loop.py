from __future__ import annotations

import dataclasses
import math

import pytest

from kvmesh.core.pace import PaceRoom, StepPace
from kvmesh.core.types import Role, WorkerInfo, WorkerLoad
from kvmesh.policy.allocation_loop import MIN_LENGTHS, AllocationLoop, within_limits
from kvmesh.policy.curves import Quadratic
from kvmesh.policy.lengths import LengthDistribution
from kvmesh.policy.offload import Threshold
from kvmesh.policy.prfaas import Hardware, ServingProfile, optimum, search
from kvmesh.policy.reallocation import ReallocationReason
from kvmesh.policy.token_pace import KEPT_SHARE
from kvmesh.policy.waiting import Waiting
from tests.unit.policy.fleet_examples import worker_info

Located = tuple[WorkerInfo, WorkerLoad]


UNLIMITED = PaceRoom()


def six(decode_running: int = 0, room: PaceRoom = UNLIMITED) -> list[Located]:
    """Two prefill and four decode workers."""
    load = WorkerLoad(decode_running=decode_running, room=room)
    prefill = [(worker_info(f"p{n}"), WorkerLoad()) for n in range(2)]
    return prefill + [(worker_info(f"d{n}", Role.DECODE), load) for n in range(4)]


SIX = six()


class TestLimits:
    SERVING = ServingProfile(
        Quadratic(0.0, 1e-4), Quadratic(0.0, 1e-3), Quadratic(0.0, 1e3), 8, 0.05, 100.0
    )
    TIGHT = PaceRoom(StepPace(0.01, 1e-5), context_tokens=1000, strictest_s=0.03)
    """A token of context takes 10 us: of 27 ms, 17 are left for 1,700 tokens."""

    def test_a_batch_is_as_large_as_the_limit_per_token_allows(self) -> None:
        found = within_limits(self.SERVING, six(3, self.TIGHT))
        assert found.decode_batch == pytest.approx(3 * 1.7)
        assert found.decode_step_s == pytest.approx(KEPT_SHARE * 0.03)

    def test_the_split_follows_it(self) -> None:
        """A decode worker serves 1.6 requests per second, or 0.4 within the limit."""
        lengths = LengthDistribution([200.0])
        hardware = Hardware(0, 6, 0.0)
        free = optimum(search(self.SERVING, lengths, hardware))
        slow = dataclasses.replace(self.TIGHT, context_tokens=1600)
        kept = optimum(search(within_limits(self.SERVING, six(1, slow)), lengths, hardware))
        assert kept.num_decode > free.num_decode

    @pytest.mark.parametrize("running", [0, 3])
    def test_without_a_limit_nothing_changes(self, running: int) -> None:
        loose = dataclasses.replace(self.TIGHT, strictest_s=math.inf)
        assert within_limits(self.SERVING, six(running, loose)) == self.SERVING

    def test_a_loose_limit_changes_nothing(self) -> None:
        loose = dataclasses.replace(self.TIGHT, strictest_s=0.5)
        assert within_limits(self.SERVING, six(3, loose)) == self.SERVING


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
            self.SERVING, Hardware(0, 6, 0.0), Threshold(float("inf"), float("inf")), SIX, queues
        )
        move = question.answer().move
        assert (move.to_role, move.reason) == (Role.PREFILL, ReallocationReason.PREFILL_BOTTLENECK)

    def test_threshold_keeps_its_lift(self) -> None:
        loop = self.loop()
        queues = loop.take_queues(2, 4)
        before = Threshold(500.0, 1000.0)
        found = loop.question(self.SERVING, Hardware(2, 6, 1e9), before, SIX, queues).answer()
        after = found.threshold(before, 2)
        assert after.tokens == pytest.approx(2 * after.base_tokens)

    def test_the_first_threshold_that_is_found_is_a_number(self) -> None:
        """Until then nothing is offloaded: the threshold is endless."""
        loop = self.loop()
        before = Threshold(math.inf, math.inf)
        queues = loop.take_queues(2, 4)
        found = loop.question(self.SERVING, Hardware(2, 6, 1e9), before, SIX, queues).answer()
        after = found.threshold(before, 2)
        assert after.tokens == after.base_tokens < math.inf
