"""`VllmRunner`: vLLM computes the steps that our scheduler plans, over our KV blocks.

The logits come from vLLM. Tokens are sampled from them exactly as in our own engine, so a stream
that moves to another worker continues with the same tokens
(docs/adr/0029-vllm-below-our-scheduler.md).

Tests: tests/contract/test_runner_contract.py, tests/vllm/test_equality.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from kvmesh.core.errors import ConfigError
from kvmesh.core.kv_formats import KV_DTYPE_BYTES
from kvmesh.core.types import KvLayout, TokenLogprobs
from kvmesh.engine.adapters import WEIGHTS, Adapter, check_rank
from kvmesh.engine.device_pool import DeviceKvPool
from kvmesh.engine.divided_pool import DividedPool
from kvmesh.engine.host_memory import HostMemory
from kvmesh.engine.memory import available_bytes
from kvmesh.engine.protocol import (
    ModelSpec,
    SampledToken,
    SequenceChunk,
    StateChunk,
    StepResult,
)
from kvmesh.engine.rank_lines import RankGate
from kvmesh.engine.sampler import sample, score_tokens
from kvmesh.engine.vllm_check import ORDER, file_identity, stop_tokens
from kvmesh.engine.vllm_internals import Computed, ModelFacts, VllmExecutor
from kvmesh.engine.vllm_memory import DeviceCache, HostCache, MakeDriver, cuda_driver
from kvmesh.engine.vllm_messages import EngineRequest, KnownSequence, NewSequence, VllmStep
from kvmesh.engine.vllm_ranks import FOLLOWER, Ranks
from kvmesh.kv.groups import HOLE, num_blocks_of
from kvmesh.kv.stages import whole_stages

_SCORED_ROWS = 128
"""Prompt positions whose logits are held in memory at once while prompt tokens are scored."""


@dataclass(slots=True)
class _Told:
    """What vLLM has been told about a sequence so far.

    Attributes:
        name: the sequence's name in vLLM.
        end: positions that vLLM has computed.
        num_blocks, last_blocks: length of the block tables that vLLM has, and their last entries.
        state: blocks of its state.
        num_tokens: tokens that vLLM knows.
        num_sampled: those of them that were sampled since vLLM was told of the sequence.
        last_token: the last sampled token; -1 if none was sampled.
    """

    name: str
    num_tokens: int
    end: int = 0
    num_blocks: int = 0
    last_blocks: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    num_sampled: int = 0
    last_token: int = -1

    def goes_on(self, chunk: SequenceChunk) -> bool:
        """Whether the chunk continues exactly where vLLM's knowledge of the sequence ends."""
        length = self.num_blocks
        for table, last in zip(chunk.tables, self.last_blocks, strict=True):
            if len(table) < length or table[length - 1] != last:
                return False
        return (
            self.end == chunk.start
            and self.num_tokens >= chunk.end
            and (chunk.state is None or [*chunk.state.live] == self.state)
            and (not self.num_sampled or chunk.token_ids[self.num_tokens - 1] == self.last_token)
        )


class VllmPlaces:
    """vLLM's places for LoRA adapters, on all ranks."""

    def __init__(self, executor: VllmExecutor) -> None:
        self._executor = executor

    @property
    def num_places(self) -> int:
        """See `AdapterPlaces.num_places`."""
        return self._executor.max_adapters

    def add(self, adapter: Adapter) -> None:
        """See `AdapterPlaces.add`."""
        check_rank(adapter, self._executor.max_adapter_rank)
        # vLLM keeps the weights beside the place that it copies them to.
        size, free = (adapter.folder / WEIGHTS).stat().st_size, available_bytes()
        if size > free:
            text = f"the adapter {adapter.name} has {size} bytes, and {free} are free on this host"
            raise ConfigError(text)
        self._executor.change_adapters(adapter)

    def remove(self, adapter: str) -> None:
        """See `AdapterPlaces.remove`."""
        self._executor.change_adapters(adapter)


class VllmRunner:
    """The `ModelRunner` that uses vLLM's executor, in this process."""

    def __init__(
        self,
        spec: ModelSpec,
        executor: VllmExecutor,
        pool: HostMemory | DeviceKvPool | DividedPool,
        ranks: Ranks | None,
    ) -> None:
        self._spec = spec
        self._executor = executor
        self._pool = pool
        self._ranks = ranks
        self._told: dict[int, _Told] = {}
        self._finished: set[str] = set()
        self._names = itertools.count()

    @classmethod
    def load(
        cls,
        request: EngineRequest,
        served_name: str,
        *,
        make_driver: MakeDriver = cuda_driver,
        follower: Sequence[str] = FOLLOWER,
        gate: RankGate | None = None,
    ) -> VllmRunner:
        """Loads a model from a Hugging Face folder with vLLM. Takes seconds.

        Args:
            make_driver: of devices, where KV is on these.
            follower: command line of the other ranks on this host.
            gate: where those of other hosts dial; None: there are none.

        Raises:
            ConfigError: vLLM, or KVMesh's use of it, cannot serve the model as requested.
        """
        ranks = Ranks(request, command=follower, gate=gate) if request.num_ranks > 1 else None
        try:
            memory = (
                DeviceCache(request, ranks, make_driver)
                if request.is_divided
                else HostCache(request.num_blocks, ranks)
            )
            place = None if ranks is None else ranks.place
            executor = VllmExecutor(request, memory, place, ranks)
            if ranks is not None:
                ranks.loaded()
            facts = executor.facts()
            layout = _layout(request, facts)
            pool = memory.pool(layout, executor.part)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        spec = ModelSpec(
            name=served_name,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            eos_token_ids=stop_tokens(request.folder),
            layout=layout,
            adapters=tuple(each.id for each in request.adapters),
            groups=facts.groups,
            group_stages=whole_stages(facts.groups, layout.block_bytes),
            embedding=facts.embedding,
        )
        return cls(spec, executor, pool, ranks)

    @property
    def spec(self) -> ModelSpec:
        """See `ModelRunner.spec`."""
        return self._spec

    @property
    def kv(self) -> HostMemory | DeviceKvPool | DividedPool:
        """See `ModelRunner.kv`."""
        return self._pool

    @property
    def partial_attention(self) -> None:
        """None: vLLM cannot split attention over blocks of several workers."""
        return

    @property
    def pair_share(self) -> float:
        """0: with vLLM, a chunk cannot wait layer by layer for KV from an upstream worker."""
        return 0.0

    @property
    def adapter_places(self) -> VllmPlaces | None:
        """See `ModelRunner.adapter_places`."""
        return VllmPlaces(self._executor) if self._executor.max_adapters else None

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """See `ModelRunner.execute`."""
        if not chunks:
            return StepResult([])
        scored: dict[int, list[TokenLogprobs]] = {}
        rest = []
        for index, chunk in enumerate(chunks):
            *before, last = cut_at_saves(chunk)
            for piece in before:
                # vLLM has a state after the last position of a step only.
                for entries in self._step([piece]).prompt_logprobs.values():
                    scored.setdefault(index, []).extend(entries)
            rest.append(last)
        result = self._step(rest)
        for index, entries in scored.items():
            result.prompt_logprobs[index] = entries + result.prompt_logprobs.get(index, [])
        return result

    def _step(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        step = VllmStep([], [], self._finished)
        self._finished = set()
        by_name = {self._tell(step, chunk): index for index, chunk in enumerate(chunks)}
        result = StepResult([None] * len(chunks))

        def choose(computed: Computed) -> list[int]:
            order = [by_name[name] for name in computed.names]
            self._score(computed, [chunks[index] for index in order], order, result)
            tokens = _choose(computed.logits, chunks, order, result)
            _embed(computed, chunks, order, result)
            return tokens

        self._executor.step(step, choose)
        self._pool.computed()
        for chunk, token in zip(chunks, result.tokens, strict=True):
            if token is not None:
                told = self._told[chunk.sequence_id]
                told.num_tokens += 1
                told.num_sampled += 1
                told.last_token = token.token_id
        return result

    def _tell(self, step: VllmStep, chunk: SequenceChunk) -> str:
        """Adds a chunk to the step and returns the sequence's name in vLLM."""
        # A later entry of a group with a window may change until its block is computed.
        length = num_blocks_of(chunk.end, self._spec.layout.block_size)
        state = self._state_of(chunk)
        told = self._told.get(chunk.sequence_id)
        num_told = 0
        if told is not None and told.goes_on(chunk):
            num_told = told.num_blocks
            more: list[list[int]] = []
            if length > num_told:
                more = self._in_order([table[num_told:length] for table in chunk.tables], ())
            step.known.append(KnownSequence(told.name, more, chunk.start, told.num_sampled))
        else:
            if told is not None:
                step.finished.add(told.name)
            # A new name each time, so that vLLM never mistakes the new sequence for the one that
            # ended.
            told = _Told(f"{chunk.sequence_id}.{next(self._names)}", len(chunk.token_ids))
            self._told[chunk.sequence_id] = told
            blocks = self._in_order([table[:length] for table in chunk.tables], state)
            tokens = list(chunk.token_ids)
            step.new.append(NewSequence(told.name, tokens, blocks, chunk.start, chunk.adapter))
        told.end = chunk.end
        if length > num_told:
            told.num_blocks = length
            told.last_blocks = [table[length - 1] for table in chunk.tables]
        if chunk.state is not None:
            told.state = list(chunk.state.live)
            first_new = max(num_told, num_blocks_of(chunk.start, self._spec.layout.block_size))
            fresh = [block for table in chunk.tables for block in table[first_new:length]]
            self._prepare(step, chunk.start, chunk.state, state, fresh)
        step.num_tokens[told.name] = chunk.end - chunk.start
        return told.name

    def _in_order(self, tables: Sequence[Sequence[int]], state: Sequence[int]) -> list[list[int]]:
        """Blocks in vLLM's order of groups, with vLLM's own block for positions that are not held.

        Args:
            state: blocks of the state; empty if vLLM knows them.
        """
        own = self._pool.num_blocks
        return [
            [own if block == HOLE else block for block in tables[kind]]
            if kind >= 0
            else list(state[-1 - kind : -kind])
            for kind in self._executor.group_order
        ]

    @staticmethod
    def _prepare(
        step: VllmStep, start: int, state: StateChunk, computed: list[int], fresh: Sequence[int]
    ) -> None:
        """Adds to a step what it does to blocks besides computing, in a model with states.

        Args:
            start: first position that the step computes.
            computed: blocks in which vLLM computes the state.
            fresh: blocks that have no positions yet. They may hold a state of before, whose bytes
                are no numbers as keys or values; vLLM clears such blocks, too.
        """
        live, source = list(state.live), list(state.source)
        step.cleared.extend(block for block in fresh if block != HOLE)
        if start == 0:
            step.cleared.extend(computed)
        elif computed != (source or live):
            step.copied.extend(zip(source or live, computed, strict=True))
        for _, blocks in state.saves:
            step.saved.extend(zip(computed, blocks, strict=True))
        if computed != live:
            step.saved.extend(zip(computed, live, strict=True))

    def _state_of(self, chunk: SequenceChunk) -> list[int]:
        """Blocks in which vLLM computes the chunk's state; none in a model without states.

        In block 0 vLLM computes none: there it is the block of sequences that fill up a batch. The
        spare block takes its place during a step.
        """
        if chunk.state is None:
            return []
        return [block or self._pool.num_blocks for block in chunk.state.live]

    def _score(
        self,
        computed: Computed,
        ordered: Sequence[SequenceChunk],
        order: Sequence[int],
        result: StepResult,
    ) -> None:
        """Computes the log-probabilities of prompt tokens, where they are requested."""
        first = 0
        for chunk, index in zip(ordered, order, strict=True):
            entries: list[TokenLogprobs] = []
            after = chunk.token_ids[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]
            # A row of logits is long: the rows of a whole prompt would not fit in memory at once.
            for begin in range(0, len(after), _SCORED_ROWS):
                ids = after[begin : begin + _SCORED_ROWS]
                logits = computed.logits_of(first + begin, first + begin + len(ids)).float()
                entries += score_tokens(logits, ids, chunk.sampling.num_prompt_logprobs)
            if entries:
                result.prompt_logprobs[index] = entries
            first += chunk.end - chunk.start

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """See `ModelRunner.forget`; vLLM is told in the next step."""
        for sequence_id in sequence_ids:
            told = self._told.pop(sequence_id, None)
            if told is not None:
                self._finished.add(told.name)

    def close(self) -> None:
        """See `ModelRunner.close`."""
        if self._ranks is not None:
            self._ranks.close()
        self._executor.close()
        self._pool.close()


def cut_at_saves(chunk: SequenceChunk) -> list[SequenceChunk]:
    """Divides a chunk so that each position whose state is saved is the end of a part."""
    if chunk.state is None or not chunk.state.saves:
        return [chunk]
    ends = sorted({position for position, _ in chunk.state.saves} | {chunk.end})
    return [
        replace(
            chunk,
            start=start,
            end=end,
            state=chunk.state.within(start, end, is_first=start == chunk.start),
            sample=chunk.sample and end == chunk.end,
        )
        for start, end in zip([chunk.start, *ends[:-1]], ends, strict=True)
    ]


def _choose(
    logits: Tensor, chunks: Sequence[SequenceChunk], order: Sequence[int], result: StepResult
) -> list[int]:
    """Samples tokens where requested, and writes them to `result`.

    Args:
        logits: [rows, vocab].
        order: index of the chunk that each row belongs to.

    Returns:
        One token per row; 0 where none is requested.
    """
    rows = [row for row, index in enumerate(order) if chunks[index].sample]
    if not rows:
        return [0] * len(order)
    wanted = logits if len(rows) == len(order) else logits[rows]
    chosen: list[SampledToken] = sample(wanted, [chunks[order[row]] for row in rows])
    tokens = [0] * len(order)
    for row, token in zip(rows, chosen, strict=True):
        result.tokens[order[row]] = token
        tokens[row] = token.token_id
    return tokens


def _embed(
    computed: Computed, chunks: Sequence[SequenceChunk], order: Sequence[int], result: StepResult
) -> None:
    """Adds embeddings to the sampled tokens, where they are requested.

    Args:
        order: index of the chunk that each row belongs to.
    """
    wanted = {row: index for row, index in enumerate(order) if chunks[index].embedding >= 0}
    rows = [row for row, index in wanted.items() if result.tokens[index] is not None]
    if not rows:
        return
    dimensions = [chunks[wanted[row]].embedding for row in rows]
    for row, found in zip(rows, computed.embeddings_of(rows, dimensions), strict=True):
        token = result.tokens[wanted[row]]
        assert token is not None, "chosen just now"
        result.tokens[wanted[row]] = replace(token, embedding=found.numpy().tobytes())


def _layout(request: EngineRequest, facts: ModelFacts) -> KvLayout:
    if facts.block_size != request.block_size:
        raise ConfigError(
            f"engine.block_size {request.block_size} does not fit this model in vLLM: "
            f"set {facts.block_size}"
        )
    if facts.kv_dtype not in KV_DTYPE_BYTES or facts.content % 2:
        raise ConfigError(f"KV of the dtype {facts.kv_dtype} cannot be handed to other workers")
    bytes_in = f"vllm {ORDER} {facts.code} {facts.kv_dtype} {facts.groups}"
    if facts.groups.state_blocks:
        # A rank has a part of each layer's state, and its layers follow each other in a block.
        bytes_in += f" {request.tensor_parallel}"
    layout = KvLayout(
        model_fingerprint=file_identity(request.folder, bytes_in),
        dtype=facts.kv_dtype,
        block_size=facts.block_size,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.content // 2,
        engine="vllm",
        order=ORDER,
    )
    assert layout.block_bytes == facts.block_bytes, "the layout does not describe vLLM's blocks"
    return layout
