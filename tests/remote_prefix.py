"""A holder and an asker of a prefix in one process: two engines, and attention between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.core.errors import LostError
from kvmesh.core.types import SequenceSpec
from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import PartialAttention, RemotePrefix
from kvmesh.engine.remote import leave_remote
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.sequence import Emission
from kvmesh.engine.sequence import Sequence as EngineSequence
from kvmesh.policy.batching import BatchLimits
from kvmesh.transfer.remote_attention import PartialAnswer

BLOCK = 4


@dataclass
class Answer:
    """Computed when it is waited for."""

    holder: DirectHolder
    arguments: tuple[int, memoryview, float]

    def wait(self) -> PartialAnswer:
        layer, queries, scale = self.arguments
        self.holder.check()
        partial = self.holder.partial
        return PartialAnswer(*partial.attend(layer, self.holder.blocks, queries, scale))


@dataclass
class DirectHolder:
    """Asks an engine of this process; dies after so many answers."""

    partial: PartialAttention
    blocks: Sequence[int]
    dies_after: int | None = None
    layers: list[int] = field(default_factory=list)

    def check(self) -> None:
        if self.dies_after is not None and len(self.layers) > self.dies_after:
            raise LostError("the holder died")

    def ask(self, layer: int, queries: memoryview, shape: Sequence[int], scale: float) -> Answer:
        self.layers.append(layer)
        assert shape[1] == self.partial.num_heads
        return Answer(self, (layer, queries, scale))


class TinyEngine:
    """A real model with its bookkeeping."""

    def __init__(self, folder: Path, *, num_blocks: int = 64, chunk: int = 8) -> None:
        self.runner = TorchRunner.load(
            folder, served_name="tiny", num_blocks=num_blocks, block_size=BLOCK, dtype="float32"
        )
        self.core = EngineCore(
            self.runner.spec, num_blocks, BatchLimits(max_tokens=chunk), growth_tokens=0
        )
        self.told: list[Emission] = []

    def admit(self, spec: SequenceSpec) -> EngineSequence:
        """Room for a prompt and what follows; `run` starts it."""
        sequence = self.core.admit_decode(spec)
        assert isinstance(sequence, EngineSequence), sequence
        sequence.on_emission = self.told.append
        return sequence

    def behind(self, sequence: EngineSequence, num_blocks: int, holder: DirectHolder) -> None:
        """Leaves the first blocks of a sequence that are not here with a holder."""
        first = sequence.num_computed // BLOCK
        holder.blocks = holder.blocks[first:num_blocks]
        leave_remote(sequence, RemotePrefix(range(first, num_blocks), holder), self.core.pool)

    def run(self, *sequences: EngineSequence) -> None:
        """Steps until nothing is left to do."""
        for sequence in sequences:
            self.core.run(sequence)
        while self.core.has_work:
            self.step()

    def step(self) -> None:
        chunks = self.core.plan_step()
        self.core.finish_step(chunks, self.runner.execute(chunks))
        self.core.check_integrity()

    def generate(self, spec: SequenceSpec) -> list[int]:
        """What it generates by itself."""
        sequence = self.admit(spec)
        self.run(sequence)
        return generated(sequence)

    def hold(self, spec: SequenceSpec, **changes: Any) -> DirectHolder:
        """Computes a prompt, and answers for its full blocks."""
        self.generate(spec)
        hashes = self.admit(spec)
        blocks = list(hashes.blocks[: hashes.num_cached // BLOCK])
        partial = self.runner.partial_attention
        assert partial is not None
        return DirectHolder(partial, blocks, **changes)

    def close(self) -> None:
        self.runner.close()


def generated(sequence: EngineSequence) -> list[int]:
    """Tokens after the prompt."""
    return sequence.tokens[len(sequence.spec.token_ids) :]
