"""The contract between the step loop and whatever computes a step. Torch-free.

`ModelRunner` has three homes: `engine/runner.py` (torch), `engine/vllm_runner.py` (vLLM's executor)
and `engine/fake.py` (deterministic, no torch). In all of them a block is one byte range over all
layers, keys and values. Tests: tests/contract/test_runner_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvmesh.core.types import KvLayout, SamplingParams, TokenLogprobs
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.kv.groups import KvGroups
from kvmesh.transfer.remote_attention import RemoteAttention

if TYPE_CHECKING:  # the contract itself needs no numpy
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a worker must know about a checkpoint.

    Attributes:
        eos_token_ids: tokens that end generation unless `ignore_eos`.
        groups: what its layers keep.
        adapters: names of LoRA adapters that sequences may ask for.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    layout: KvLayout
    groups: KvGroups = KvGroups()
    adapters: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """Blocks of a sequence that another worker holds.

    Attributes:
        blocks: indexes in the sequence; those before them are here.
        attention: asks their holder, from the thread that computes.
    """

    blocks: range
    attention: RemoteAttention


@dataclass(frozen=True, slots=True)
class UpstreamPart:
    """Leading positions that another worker computes at the same time, layer by layer.

    Attributes:
        end: one past the last of them, a multiple of the block size.
        gate: says which layers of their KV are in the sequence's blocks.
        settle: called on the event loop after the step, before the sequence goes on: True if all
            layers came, False if the sequence is HELD again and has computed nothing.
    """

    end: int
    gate: LayerGate
    settle: Callable[[bool], None]


class TokenConstraint(Protocol):
    """Says which tokens may come next; one per sequence, called from the engine's thread."""

    @property
    def ready(self) -> bool:
        """Whether `allowed` answers at once; until then the sequence takes part in no step."""
        ...

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        """The tokens that may follow.

        Args:
            generated: all tokens after the client's prompt; calls for one sequence only add some.

        Returns:
            [vocab], at least one True.

        Raises:
            StructureError: the structure cannot be compiled, or cannot go on.
        """
        ...


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
        constraint: limits what may be chosen; None is free text.
        score_prompt: report log-probabilities of the prompt's tokens that follow these positions.
        on_layers: told, in the thread that computes, how many layers have KV of all positions up
            to the chunk's end, on a device before the pool's moment; a runner may tell it seldom
            or never.
        remote: blocks of the prefix that are holes in `block_table`, and whom to ask instead.
        upstream: positions before `start` that arrive while this chunk is computed, alone in its
            step: each layer waits for its own part of them.
        adapter: of `ModelSpec.adapters`; empty is none.
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

    constraint: TokenConstraint | None = None
    score_prompt: bool = False
    on_layers: Callable[[int], None] | None = None
    remote: RemotePrefix | None = None
    upstream: UpstreamPart | None = None
    adapter: str = ""

    @property
    def num_scored(self) -> int:
        """Positions of the chunk after which the prompt goes on, if they are to be scored."""
        if not self.score_prompt:
            return 0
        return max(0, min(self.end, self.num_prompt_tokens - 1) - self.start)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token chosen for a sequence; its position is the chunk's `end`.

    Attributes:
        error: why no token could be chosen; the sequence ends.
        damaged: the logits were not numbers: the engine is at fault, and not the request.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""
    damaged: bool = False


@dataclass(slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        tokens: per chunk the sampled token, or None where `sample` was False.
        prompt_logprobs: by index of the chunk, `num_scored` entries, of positions start + 1 on.
        lost: indexes of chunks whose remote prefix did not answer, or whose upstream part did not
            come; nothing of them counts.
    """

    tokens: list[SampledToken | None] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()


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


class PartialAttention(Protocol):
    """Attention for sequences of other workers, over blocks that are here."""

    @property
    def num_heads(self) -> int:
        """Of the model's queries."""
        ...

    def attend(
        self, layer: int, blocks: Sequence[int], queries: memoryview, scale: float
    ) -> tuple[memoryview, memoryview]:
        """Attention over all positions of some blocks. Called in any thread but the loop's.

        Args:
            queries: writable bytes of [queries, heads, head_dim] in the pool's dtype, rotated.

        Returns:
            Bytes of the output, as `queries`, and of [queries, heads] fp32, the log of the sums
            of exponentials.
        """
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

    @property
    def partial_attention(self) -> PartialAttention | None:
        """For queries of other workers; None: this model's attention cannot be cut in parts.

        With it, chunks may have a remote prefix.
        """
        ...

    @property
    def pair_share(self) -> float:
        """Work of attention to one position, as a share of the rest of a token's work.

        0: chunks may not have an upstream part.
        """
        ...

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """Computes the chunks as one batch, writes their KV and samples where asked.

        The tokens chosen do not depend on what else is in the batch.
        """
        ...

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Says that sequences ended, or lost their blocks and come back with others.

        Called as `execute`, between steps; of ids that were never computed too.
        """
        ...

    def close(self) -> None:
        """Frees memory. May be called again."""
        ...
