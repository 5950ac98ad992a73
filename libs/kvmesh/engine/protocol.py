"""The contract between the step loop and the runner that computes a step. Torch-free.

`ModelRunner` has three implementations: `engine/runner.py` (torch), `engine/vllm_runner.py` (vLLM's
executor) and `engine/fake.py` (deterministic, no torch). In all of them a block is one byte range
over all layers, keys and values. Tests: tests/contract/test_runner_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import KvLayout, SamplingParams, TokenLogprobs
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.kv.stages import Stages, plain_stages
from kvmesh.transfer.remote_attention import RemoteAttention

if TYPE_CHECKING:  # the contract itself needs no numpy and no safetensors
    import numpy as np
    from numpy.typing import NDArray

    from kvmesh.engine.adapters import Adapter


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Embeddings that a runner computes: vectors of float32, one for a prompt.

    Attributes:
        size: number of dimensions.
        shorter: numbers of leading dimensions that a request may ask for instead; empty for models
            that were not trained for it (Matryoshka).
    """

    size: int
    shorter: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a checkpoint that a worker needs.

    Attributes:
        eos_token_ids: tokens that end generation unless `ignore_eos`.
        groups: KV groups of its layers.
        adapters: ids of LoRA adapters that sequences may use, at the start of the engine.
        group_stages: stages of a model whose blocks do not hold all layers in their order.
        embedding: None if this runner computes no embeddings.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    layout: KvLayout
    groups: KvGroups = KvGroups()
    adapters: tuple[str, ...] = ()
    group_stages: Stages = ()
    embedding: EmbeddingSpec | None = None

    @property
    def stages(self) -> Stages:
        """In which order blocks are filled."""
        layout = self.layout
        return self.group_stages or plain_stages(layout.num_layers, layout.block_bytes)


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Blocks of linear layers' states for one chunk.

    Attributes:
        live: blocks that hold the state after the chunk.
        source: blocks that hold the state before it; empty at the beginning of a sequence.
        saves: positions within the chunk, possibly its end, each with blocks to copy its state to.
    """

    live: Sequence[int]
    source: Sequence[int]
    saves: Sequence[tuple[int, Sequence[int]]] = ()

    def within(self, start: int, end: int, *, is_first: bool) -> StateChunk:
        """Returns the blocks for a part of the chunk: the positions from `start` to before `end`.

        Args:
            is_first: whether the chunk begins with this part.
        """
        saves = [save for save in self.saves if start < save[0] <= end]
        return StateChunk(self.live, self.source if is_first else self.live, saves)


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """Blocks of a sequence that another worker holds.

    Attributes:
        blocks: their indexes in the sequence; this worker has the blocks before them.
        attention: queries their holder; used from the computing thread.
    """

    blocks: range
    attention: RemoteAttention


@dataclass(frozen=True, slots=True)
class UpstreamPart:
    """Leading positions of a prompt that another worker computes at the same time, layer by layer.

    Attributes:
        end: one past the last of them, a multiple of the block size.
        gate: says which stages of their KV are in the sequence's blocks.
        settle: called on the event loop after the part, before the sequence continues: True if all
            stages arrived, False if the sequence computed nothing; it is then HELD again, or GONE.
        state: blocks that receive the state after them.
    """

    end: int
    gate: LayerGate
    settle: Callable[[bool], None]
    state: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class PartPace:
    """Pace of a part of a prompt, which is computed layer by layer, in each layer piece by piece.

    Attributes:
        piece_tokens: tokens of a piece.
        step_tokens: work of one call of `execute`, as the tokens of an equally long step.
    """

    piece_tokens: int
    step_tokens: int


class TokenConstraint(Protocol):
    """Restricts the next token of one sequence; called from the engine's thread."""

    @property
    def ready(self) -> bool:
        """Whether `allowed` answers at once; until then the sequence takes part in no step."""
        ...

    def allowed(self, generated: Sequence[int]) -> NDArray[np.bool_]:
        """Returns the tokens that may follow.

        Args:
            generated: all tokens after the client's prompt; they only grow between calls.

        Returns:
            [vocab], at least one True.

        Raises:
            StructureError: the structure cannot be compiled, or cannot continue.
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
            group with a window, blocks that no query of the chunk sees may be `HOLE`.
        num_prompt_tokens: length of the client's prompt, for penalties.
        sample: choose a token after position end - 1 (then end == len(token_ids)).
        more_tables: block tables of the other token groups.
        state: None for a model without linear layers.
        constraint: limits the tokens that may be chosen; None for free text.
        score_prompt: report log-probabilities of the prompt's tokens that follow these positions.
        on_layers: called in the computing thread with the number of stages that have KV of all
            positions up to the chunk's end; on a device, at the pool's present moment. A runner
            may call it seldom or never.
        remote: blocks of the prefix that are holes in `block_table`, and their holder.
        pace: the chunk is a part of a prompt, alone in its steps, of which it takes several.
        upstream: positions before `start` that arrive while such a part is computed: each stage
            waits for its own part of them.
        adapter: id of a loaded adapter; empty for none.
        embedding: see `SequenceSpec.embedding`; it is of all tokens up to `end`, if `sample`.
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
    pace: PartPace | None = None
    upstream: UpstreamPart | None = None
    adapter: str = ""
    embedding: int = -1

    @property
    def num_scored(self) -> int:
        """Number of positions of the chunk whose next prompt token is to be scored."""
        if not self.score_prompt:
            return 0
        return max(0, min(self.end, self.num_prompt_tokens - 1) - self.start)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token chosen for a sequence; its position is the chunk's `end`.

    Attributes:
        error: why no token could be chosen; the sequence ends.
        damaged: the logits contained NaN or infinity: a fault of the engine, not of the request.
        embedding: if requested: float32, little-endian.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""
    damaged: bool = False
    embedding: bytes = b""


@dataclass(slots=True)
class StepResult:
    """Result of a step.

    Attributes:
        tokens: per chunk the sampled token, or None where `sample` was False.
        prompt_logprobs: by index of the chunk, `num_scored` entries, for positions start + 1 on.
        lost: indexes of chunks whose remote prefix did not answer or whose upstream part did not
            arrive; they count as not computed.
        unfinished: indexes of parts that continue in a further step, and the number of upstream
            stages that must have arrived by then.
    """

    tokens: list[SampledToken | None] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    lost: frozenset[int] = frozenset()
    unfinished: dict[int, int] = field(default_factory=dict)


class KvMemory(Protocol):
    """Byte access to KV blocks for the data channel."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        ...

    def read_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns the bytes of a run of blocks, to be sent.

        A host pool returns the memory itself, a device pool a staged copy. The caller keeps the
        blocks referenced until the bytes are sent.
        """
        ...

    def write_view(self, first_block: int, num_blocks: int) -> memoryview:
        """Returns writable bytes for a run of blocks that are being received."""
        ...

    def written(self, first_block: int, num_blocks: int) -> None:
        """Records that `write_view` of this run was filled; a device pool copies it now."""
        ...


class PartialAttention(Protocol):
    """Attention for sequences of other workers, over blocks of this worker."""

    @property
    def num_heads(self) -> int:
        """Number of query heads of the model."""
        ...

    def attend(
        self, layer: int, blocks: Sequence[int], queries: memoryview, scale: float
    ) -> tuple[memoryview, memoryview]:
        """Computes attention over all positions of some blocks. Not called in the loop's thread.

        Args:
            queries: writable bytes of [queries, heads, head_dim] in the pool's dtype, rotated.

        Returns:
            Bytes of the output, shaped like `queries`, and of [queries, heads] fp32, the log of the
            sums of exponentials.
        """
        ...


class AdapterPlaces(Protocol):
    """Slots for LoRA adapters in an engine. Called like `ModelRunner.execute`, between steps."""

    @property
    def num_places(self) -> int:
        """Maximum number of adapters that the engine holds at once."""
        ...

    def add(self, adapter: Adapter) -> None:
        """Loads an adapter; a place is free.

        Raises:
            CheckpointError: its weights do not fit the model.
            ConfigError: its rank does not fit the places.
        """
        ...

    def remove(self, adapter: str) -> None:
        """Frees the place of an adapter, by its id; no sequence uses it."""
        ...


class ModelRunner(Protocol):
    """Computes steps. `execute` is called from one thread at a time, never the event loop's."""

    @property
    def spec(self) -> ModelSpec:
        """Facts about the loaded model."""
        ...

    @property
    def kv(self) -> KvMemory:
        """The KV pool."""
        ...

    @property
    def partial_attention(self) -> PartialAttention | None:
        """Attention for other workers' queries; None if this model's cannot be split over blocks.

        If it is not None, chunks may have a remote prefix.
        """
        ...

    @property
    def pair_share(self) -> float:
        """Attention work per attended position, as a fraction of the rest of a token's work.

        0 means that chunks may not have an upstream part.
        """
        ...

    @property
    def adapter_places(self) -> AdapterPlaces | None:
        """Slots for LoRA adapters that are loaded while it runs; None: this engine has none."""
        ...

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """Computes the chunks as one batch, writes their KV and samples where requested.

        A chunk's token does not depend on the rest of the batch.
        """
        ...

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """Records that sequences ended, or lost their blocks and return with others.

        Called like `execute`, between steps; ids may never have been computed.
        """
        ...

    def close(self) -> None:
        """Frees memory. May be called again."""
        ...
