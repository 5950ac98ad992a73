"""A prompt on two engines: one computes its beginning, the other the rest, a layer behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.engine.protocol import UpstreamPart
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sequence import Emission, Sequence, SequenceState
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits
from tests.unit.engine.tiny_checkpoint import write_checkpoint

BLOCK, NUM_LAYERS = 4, 2
PROMPT = [3 + 7 * number % 61 for number in range(60)]
CUT = 36
ROOT = root_hash("test")


@pytest.fixture
def runners(tmp_path: Path) -> Iterator[tuple[TorchRunner, TorchRunner]]:
    folder = write_checkpoint(tmp_path / "tiny")
    made = [
        TorchRunner.load(folder, served_name="tiny", num_blocks=64, block_size=BLOCK)
        for _ in range(2)
    ]
    yield made[0], made[1]
    for runner in made:
        runner.close()


def core_of(runner: TorchRunner) -> EngineCore:
    # A budget that no part of the prompt fits.
    return EngineCore(runner.spec, runner.kv.num_blocks, BatchLimits(max_tokens=8))


def admitted(core: EngineCore, tokens: list[int]) -> tuple[Sequence, list[int]]:
    spec = SequenceSpec(
        tuple(tokens), len(tokens), SamplingParams(temperature=0.0, max_tokens=4), ROOT
    )
    sequence = core.admit_prefill(spec, held=True)
    assert isinstance(sequence, Sequence)
    found: list[int] = []

    def note(emission: Emission) -> None:
        found.append(emission.token_id)

    sequence.on_emission = note
    return sequence, found


def run(core: EngineCore, runner: TorchRunner) -> int:
    """Steps until nothing is to be done; how many."""
    count = 0
    while chunks := core.plan_step():
        core.finish_step(chunks, runner.execute(chunks))
        count += 1
    return count


class Chain:
    """Copies each layer from the first engine's blocks to the second one's."""

    def __init__(self, first: TorchRunner, second: TorchRunner, stop_at: int = NUM_LAYERS) -> None:
        self.cores = core_of(first), core_of(second)
        self.gate = LayerGate()
        self.settled: list[bool] = []
        self._runners = first, second
        self._stop_at = stop_at
        self.head, _ = admitted(self.cores[0], PROMPT[:CUT])
        self.tail, self.tokens = admitted(self.cores[1], PROMPT)
        self.head.is_part = self.tail.is_part = True
        self.head.on_layers = self._leave
        self.fill = self.cores[1].begin_fill(self.tail)
        self._blocks = self.fill.open(CUT // BLOCK)
        self.tail.upstream = UpstreamPart(CUT, self.gate, self._settle, self.fill.state)

    def _leave(self, num_layers: int) -> None:
        if num_layers > self._stop_at:
            self.gate.close()
            return
        assert self._blocks is not None
        source, target = (runner.kv.tensor for runner in self._runners)
        layer = num_layers - 1
        for mine, theirs in zip(self.head.blocks, self._blocks, strict=False):
            target[theirs, layer] = source[mine, layer]
        self.gate.arrived(num_layers)

    def _settle(self, came: bool) -> None:
        self.settled.append(came)
        assert self._blocks is not None
        self.fill.close(len(self._blocks) if came else 0)
        self.fill.end()

    def compute(self) -> tuple[int, int]:
        """Both in turns; steps of each."""
        for core, sequence in zip(self.cores, (self.head, self.tail), strict=True):
            core.run(sequence)
        counts = [0, 0]
        while True:
            before = list(counts)
            for index, (core, runner) in enumerate(zip(self.cores, self._runners, strict=True)):
                chunks = core.plan_step()
                if chunks:
                    core.finish_step(chunks, runner.execute(chunks))
                    counts[index] += 1
            if counts == before:
                return counts[0], counts[1]


def alone(runner: TorchRunner) -> list[int]:
    core = core_of(runner)
    sequence, tokens = admitted(core, PROMPT)
    core.run(sequence)
    run(core, runner)
    core.release(sequence)
    return tokens


def test_the_first_token_is_that_of_one_engine(runners: tuple[TorchRunner, TorchRunner]) -> None:
    expected = alone(runners[0])
    chain = Chain(*runners)
    # 36 and 24 tokens, 8 in a step.
    assert chain.compute() == (5, 3)
    assert chain.tokens == expected
    assert chain.settled == [True]
    # What another computed is cached here as if it had been computed here.
    chain.cores[1].release(chain.tail)
    again, tokens = admitted(chain.cores[1], PROMPT)
    assert again.num_cached == (len(PROMPT) - 1) // BLOCK * BLOCK
    chain.cores[1].run(again)
    run(chain.cores[1], runners[1])
    assert tokens == expected
    chain.cores[1].release(again)
    assert chain.cores[1].is_idle


@pytest.mark.parametrize("stop_at", range(NUM_LAYERS))
def test_a_part_that_stops_coming_is_computed_here(
    runners: tuple[TorchRunner, TorchRunner], stop_at: int
) -> None:
    expected = alone(runners[0])
    chain = Chain(*runners, stop_at=stop_at)
    chain.compute()
    assert chain.settled == [False]
    assert chain.tail.state is SequenceState.HELD
    assert not chain.tokens
    core = chain.cores[1]
    core.run(chain.tail)
    assert run(core, runners[1]) == 8, "in chunks, as any prompt"
    assert chain.tokens == expected
    core.release(chain.tail)
    assert core.is_idle
    core.check_integrity()


def test_a_part_without_its_request_frees_its_blocks_after_step_and_writer(
    runners: tuple[TorchRunner, TorchRunner],
) -> None:
    chain = Chain(*runners)
    core = chain.cores[1]
    core.run(chain.tail)
    chunks = core.plan_step()
    core.release(chain.tail)
    assert core.pool.num_free < core.pool.num_blocks
    chain.gate.close()
    core.finish_step(chunks, runners[1].execute(chunks))
    assert chain.settled == [False]
    assert core.is_idle


def test_a_part_that_is_given_up_between_two_steps_is_settled_at_once(
    runners: tuple[TorchRunner, TorchRunner],
) -> None:
    chain = Chain(*runners)
    core = chain.cores[1]
    core.run(chain.tail)
    chunks = core.plan_step()
    core.finish_step(chunks, runners[1].execute(chunks))
    assert core.plan_step() == [], "no layer has come"
    assert not chain.settled
    core.release(chain.tail)
    assert chain.settled == [False]
    runners[1].forget(core.take_gone())
    assert not runners[1]._parts
    assert core.is_idle


def test_answers_go_on_between_the_steps_of_a_part(
    runners: tuple[TorchRunner, TorchRunner],
) -> None:
    """On a worker that also decodes; and the part takes nobody's tokens away."""
    expected = alone(runners[0])
    core, runner = core_of(runners[0]), runners[0]
    answer, answered = admitted(core, PROMPT[5:20])
    answer.hold_after_first = False
    core.run(answer)
    while not answered:
        chunks = core.plan_step()
        core.finish_step(chunks, runner.execute(chunks))
    part, tokens = admitted(core, PROMPT)
    part.is_part = True
    core.run(part)
    order: list[str] = []
    while chunks := core.plan_step():
        assert len(chunks) == 1
        order.append("part" if chunks[0].pace is not None else "answer")
        core.finish_step(chunks, runner.execute(chunks))
    assert tokens == expected
    assert order == ["part", "answer"] * 3 + ["part"] * 5, "60 tokens, 8 in a step"
    core.release(part)
    assert core.is_idle
