"""Engines that compute parts of one prompt, beside one another, without workers around them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.engine.protocol import UpstreamPart
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sequence import Emission, Sequence
from kvmesh.kv.hashing import root_hash
from kvmesh.policy.batching import BatchLimits

ROOT = root_hash("test")
LIMITS = BatchLimits(max_tokens=32)


def _into(found: list[int]) -> Callable[[Emission], None]:
    return lambda emission: found.append(emission.token_id)


class ChainedEngines:
    """A chain of engines; each stage is copied from one to the next as soon as it is there.

    Attributes:
        steps: of each engine, whether they were a part's; else they were of answers beside it.
    """

    def __init__(self, runners: SequenceOf[TorchRunner], limits: BatchLimits = LIMITS) -> None:
        self.runners, self.limits = runners, limits
        self.cores = [EngineCore(each.spec, each.kv.num_blocks, limits) for each in runners]
        self.num_copied = 0
        self.steps: list[list[bool]] = [[] for _ in runners]

    def begin_answers(self, tokens: SequenceOf[int], sampling: SamplingParams) -> list[list[int]]:
        """Lets each engine answer a prompt, which goes on beside what comes; the answers so far."""
        answers: list[list[int]] = []
        for number, core in enumerate(self.cores):
            spec = SequenceSpec(tuple(tokens), len(tokens), sampling, ROOT)
            sequence = core.admit_decode(spec)
            assert isinstance(sequence, Sequence), sequence
            answers.append([])
            sequence.on_emission = _into(answers[-1])
            core.run(sequence)
            while not answers[-1]:
                self._step(number)
        return answers

    def generate(
        self, tokens: SequenceOf[int], cuts: SequenceOf[int], sampling: SamplingParams
    ) -> list[int]:
        """The answer of the last engine.

        Args:
            cuts: where parts end, multiples of the block size; not the prompt's own end.
        """
        sequences: list[Sequence] = []
        found: list[int] = []
        for number, end in enumerate((*cuts, len(tokens))):
            core = self.cores[number]
            spec = SequenceSpec(tuple(tokens[:end]), end, sampling, ROOT)
            sequence = core.admit_prefill(spec, held=True)
            assert isinstance(sequence, Sequence), sequence
            sequence.is_part = True
            if number:
                self._link(number, sequences[-1], sequence, cuts[number - 1])
            sequences.append(sequence)

        sequences[-1].on_emission = _into(found)
        sequences[-1].hold_after_first = False
        for core, sequence in zip(self.cores, sequences, strict=False):
            core.run(sequence)
        while sum(self._step(number) for number in range(len(sequences))):
            pass
        for core, sequence in zip(self.cores, sequences, strict=False):
            core.release(sequence)
            core.check_integrity()
            assert core.is_idle
        return found

    def _step(self, number: int) -> bool:
        core, runner = self.cores[number], self.runners[number]
        chunks = core.plan_step()
        if chunks:
            self.steps[number].append(chunks[0].pace is not None)
            runner.forget(core.take_gone())
            core.finish_step(chunks, runner.execute(chunks))
        return bool(chunks)

    def _link(self, number: int, head: Sequence, tail: Sequence, end: int) -> None:
        """Lets the stages of one engine's part into the next one's blocks."""
        core, before = self.cores[number], self.cores[number - 1]
        size = core.block_size
        fill = core.begin_fill(tail)
        num_held = fill.num_held
        opened = fill.open(end // size, len(tail.tokens))
        assert opened is not None
        blocks, kinds = list(opened), list(fill.kinds)
        gate, stages = LayerGate(), core.spec.stages
        source, target = self.runners[number - 1].kv, self.runners[number].kv

        def leave(num_stages: int) -> None:
            arriving = before.arriving_blocks(head, num_held)
            assert [each.kind for each in arriving] == kinds
            for stage in stages[gate.num_stages : num_stages]:
                part = slice(stage.offset, stage.end)
                for mine, theirs in zip(arriving, blocks, strict=True):
                    if mine.kind == stage.kind:
                        view = source.read_view(mine.block, 1)
                        target.write_view(theirs, 1)[part] = view[part]
            self.num_copied += num_stages - gate.num_stages
            gate.arrived(num_stages)

        def settle(came: bool) -> None:
            assert came
            fill.close(len(blocks))
            fill.end()

        head.on_layers = leave
        tail.upstream = UpstreamPart(end, gate, settle, fill.state)
