"""The contract between the step loop and whatever computes a step. Torch-free.

`ModelRunner` has two homes: `engine/runner.py` (torch) and `engine/fake.py` (deterministic, no
torch). Both hold KV in memory of the layout `(num_blocks, layers, 2, block_size, kv_heads,
head_dim)`, one block one byte range. Tests: tests/contract/test_runner_contract.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.core.types import KvLayout, SamplingParams, TokenLogprobs
from kvmesh.kv.groups import KvGroups


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a worker must know about a checkpoint.

    Attributes:
        eos_token_ids: tokens that end generation unless `ignore_eos`.
        groups: what its layers keep.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    layout: KvLayout
    groups: KvGroups = KvGroups()


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Blocks of linear layers' states for one chunk.

    Attributes:
        live: holds the state after the chunk.
        source: holds the state before it; empty at the beginning of a sequence.
        saves: positions within the chunk, its end among them, and where to copy the state there.
    """

    live: Sequence[int]
    source: Sequence[int]
    saves: Sequence[tuple[int, Sequence[int]]] = ()


@dataclass(slots=True)
class SequenceChunk:
    """The part of one sequence that a step computes.

    Attributes:
        sequence_id: stable while the sequence lives on this worker.
        token_ids: all tokens of the sequence so far (not copied; read only).
        start: first position to compute; KV of positions before it is in the blocks.
        end: one past the last position to compute; at least start + 1.
        block_table: block ids of the first token group, enough to hold `end` positions. In a
            group with a window, those that no query of the chunk sees may be `HOLE`.
        num_prompt_tokens: where the client's prompt ends, for penalties.
        sample: choose a token after position end - 1 (then end == len(token_ids)).
        more_tables: of the other token groups.
        state: None for a model without linear layers.
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    end: int
    block_table: Sequence[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    sample: bool
    eos_token_ids: frozenset[int] = frozenset()
    more_tables: Sequence[Sequence[int]] = ()
    state: StateChunk | None = None

    @property
    def tables(self) -> tuple[Sequence[int], ...]:
        """Block tables of all token groups."""
        return (self.block_table, *self.more_tables)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token chosen for a sequence; its position is the chunk's `end`."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class StepResult:
    """One entry per chunk of the step: the sampled token, or None where `sample` was False."""

    tokens: list[SampledToken | None] = field(default_factory=list)


class KvMemory(Protocol):
    """Byte access to KV blocks for the data channel."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Bytes of a run of blocks, to be sent.

        On a host pool it is the memory itself; on a device it is a staged copy. The caller
        keeps the blocks referenced until the bytes are sent.
        """
        ...

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Writable bytes for a run of blocks that are being received."""
        ...

    def written(self, first_block: int, num_blocks: int) -> None:
        """Says that `write_view` of this run was filled; a device pool copies it over now."""
        ...


class ModelRunner(Protocol):
    """Computes steps. `execute` is called from one thread at a time, never the event loop's."""

    @property
    def spec(self) -> ModelSpec:
        """What was loaded."""
        ...

    @property
    def kv(self) -> KvMemory:
        """The KV pool."""
        ...

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """Computes the chunks as one batch, writes their KV and samples where asked.

        The tokens chosen do not depend on what else is in the batch.
        """
        ...

    def close(self) -> None:
        """Frees memory. May be called again."""
        ...
