"""Who gets blocks and who loses them: by age, and never back and forth within one plan."""

from __future__ import annotations

import pytest

from kvmesh.core.types import Refusal
from kvmesh.engine.core import EngineCore
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.sequence import Sequence, SequenceState
from kvmesh.policy.step_rules import StepRules
from tests.worker_driver import make_spec, reference_tokens


def prompt(length: int, seed: int) -> list[int]:
    return [100 * seed + position % 90 for position in range(1, length + 1)]


class Bench:
    """A core and its runner, stepped by hand; counts who lost its blocks in each plan."""

    def __init__(self, num_blocks: int) -> None:
        self.runner = FakeRunner(num_blocks=num_blocks)
        self.core = EngineCore(self.runner.spec, num_blocks, growth_tokens=0)
        self.sequences: list[Sequence] = []
        self.lost = 0

    def admit(self, length: int, max_tokens: int) -> Sequence:
        seed = len(self.sequences) + 1
        sequence = self.core.admit_decode(make_spec(prompt(length, seed), max_tokens))
        assert not isinstance(sequence, Refusal), sequence
        self.sequences.append(sequence)
        return sequence

    def step(self) -> int:
        running = [s for s in self.sequences if s.state is SequenceState.RUNNING]
        chunks = self.core.plan_step()
        self.lost += sum(s.state is SequenceState.PREEMPTED for s in running)
        if chunks:
            self.core.finish_step(chunks, self.runner.execute(chunks))
        self.core.check_integrity()
        return len(chunks)

    def check_tokens(self, sequence: Sequence) -> None:
        spec = sequence.spec
        assert sequence.tokens[len(spec.token_ids) :] == reference_tokens(spec)


def test_who_runs_gets_its_blocks_before_another_comes_back() -> None:
    bench = Bench(6)
    older, younger = bench.admit(32, max_tokens=20), bench.admit(33, max_tokens=20)
    others = bench.admit(10, max_tokens=1)  # waits for its KV
    for sequence in (older, younger):
        bench.core.run(sequence)
    while older.num_computed < 48:
        bench.step()
    assert younger.state is SequenceState.PREEMPTED
    # There are blocks for the younger one now, if the older one did not need one of them.
    bench.core.release(others)
    bench.step()
    assert bench.core.statistics().preemptions_total == bench.lost == 1
    while bench.core.has_work:
        assert bench.step()
    for sequence in (older, younger):
        bench.check_tokens(sequence)
    assert bench.core.statistics().preemptions_total == 1
    assert bench.core.is_idle


@pytest.mark.parametrize("num_blocks", range(8, 13))
def test_nobody_is_preempted_twice_in_one_plan(num_blocks: int) -> None:
    bench = Bench(num_blocks)
    for length in (40, 34, 28):
        bench.core.run(bench.admit(length, max_tokens=60))
    while bench.core.has_work:
        assert bench.step()
    assert bench.core.statistics().preemptions_total == bench.lost > 0
    for sequence in bench.sequences:
        bench.check_tokens(sequence)
    assert bench.core.is_idle


def test_one_that_starts_late_keeps_its_blocks_by_its_age() -> None:
    bench = Bench(9)
    late = bench.admit(62, max_tokens=30)
    young = bench.admit(62, max_tokens=30)
    bench.core.run(young)
    bench.step()
    bench.core.run(late)
    while not bench.lost:
        bench.step()
    assert (late.state, young.state) == (SequenceState.RUNNING, SequenceState.PREEMPTED)


def test_blocks_of_one_that_stops_for_lack_of_them_serve_another() -> None:
    bench = Bench(8)
    older = bench.admit(30, max_tokens=30)
    younger = bench.admit(62, max_tokens=60)
    others = bench.admit(20, max_tokens=1)  # waits for its KV and keeps two blocks
    bench.core.run(older)
    while older.state is SequenceState.RUNNING:
        bench.step()
    bench.core.run(younger)
    while bench.step():
        pass
    assert older.state is SequenceState.GONE
    bench.check_tokens(older)
    # What is left of the pool is not enough for the younger one.
    assert younger.state is SequenceState.PREEMPTED
    bench.core.release(others)
    while bench.core.has_work:
        assert bench.step()
    bench.check_tokens(younger)
    assert bench.core.is_idle


def test_on_a_prefill_worker_prompts_come_first_and_answers_go_on() -> None:
    """As on a worker that was told to help prefill while it still decodes."""
    bench = Bench(200)
    answer = bench.admit(20, max_tokens=40)
    bench.core.run(answer)
    bench.step()
    prompt_only = bench.admit(1000, max_tokens=1)
    bench.core.run(prompt_only)
    seen: dict[bool, list[tuple[int, int]]] = {}
    for prompts_first in (False, True):
        bench.core.set_rules(StepRules(prompts_first))
        before = answer.num_computed, prompt_only.num_computed
        bench.step()
        after = answer.num_computed, prompt_only.num_computed
        seen[prompts_first] = [(after[0] - before[0], after[1] - before[1])]
    assert seen == {False: [(1, 511)], True: [(1, 489)]}  # all that is left fits beside it
    others = [bench.admit(1000, max_tokens=1) for _ in range(3)]
    for each in others:
        bench.core.run(each)
    steps = []
    for _ in range(6):
        so_far = answer.num_computed
        bench.step()
        steps.append(answer.num_computed - so_far)
    assert steps == [0, 0, 1, 0, 0, 1]
    while bench.core.has_work:
        bench.step()
    for sequence in bench.sequences:
        bench.check_tokens(sequence)
    assert bench.core.is_idle
