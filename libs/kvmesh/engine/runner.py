"""`TorchRunner`: loads a checkpoint and computes steps of mixed prefill chunks and decode steps.

Tests: tests/unit/engine/test_runner.py, tests/integration/test_transformers_equality.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from kvmesh.core.clock import SystemClock
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import TokenLogprobs
from kvmesh.engine.batch import StepBatch, build_batch
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.device_check import require_device, require_room_for_latents
from kvmesh.engine.families import FAMILIES
from kvmesh.engine.kv_cache import TORCH_DTYPES, KvPool, allocate_pool
from kvmesh.engine.kv_plan import KvPlan, kv_layout, kv_stages, plan_kv
from kvmesh.engine.kv_shape import group_view
from kvmesh.engine.layers import StepMemory
from kvmesh.engine.memory import available_bytes, memory_needed, require_memory, resolve_dtype
from kvmesh.engine.model import DecoderModel, load_model
from kvmesh.engine.pair_share import pair_share
from kvmesh.engine.part_run import PartRun, Pauses, UpstreamLostError
from kvmesh.engine.partial import PoolAttention, can_be_parted
from kvmesh.engine.protocol import ModelSpec, SampledToken, SequenceChunk, StepResult
from kvmesh.engine.sampler import sample, score_tokens
from kvmesh.engine.stage_progress import LayerWatch, StepProgress
from kvmesh.engine.static_inputs import InputShape, StaticInputs
from kvmesh.engine.static_step import StaticStep
from kvmesh.engine.step_graphs import CaptureBounds, CudaGraphDevice, StepGraphs
from kvmesh.engine.weights import WeightFiles, fingerprint
from kvmesh.kernels.dispatch import plan_attention
from kvmesh.kernels.latent import StepLatent
from kvmesh.kernels.split_attention import RemotePart, SplitAttention
from kvmesh.kernels.states import StepStates
from kvmesh.kernels.upload import sent

_SCORED_ROWS = 128
"""Number of prompt positions whose logits are in memory at once."""


class TorchRunner:
    """The `ModelRunner` that computes with torch, on the CPU or one CUDA device."""

    def __init__(
        self, spec: ModelSpec, model: DecoderModel, plan: KvPlan, pool: KvPool, device: str
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._model: DecoderModel | None = model
        self._pool = pool
        self._keeps_latents = model.config.latent is not None
        can_part = can_be_parted(model, plan.groups)
        self._partial = PoolAttention(pool, model.config.num_heads) if can_part else None
        # A device has no memory besides its pool for a part's activations between two layers.
        self._pair_share = pair_share(model.config) if device == "cpu" else 0.0
        self._parts: dict[int, PartRun] = {}
        self._device = device
        self._static: StaticStep | None = None

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        served_name: str,
        device: str = "cpu",
        dtype: str = "auto",
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int | None = None,
        num_threads: int = 1,
    ) -> TorchRunner:
        """Loads a Hugging Face folder.

        Args:
            device: "cpu", "cuda" or "cuda:N".
            dtype: "float32", "float16", "bfloat16", or "auto" for the checkpoint's own.
            block_size: positions in a block; a model with linear layers takes the next multiple
                of it at which a block holds a layer's state.
            max_model_len: maximum sequence length; None for the checkpoint's own limit.
            num_threads: CPU threads of this process's matrix products.

        Raises:
            CheckpointError: the folder is incomplete or not supported.
            ConfigError: the arguments cannot be met, for example for lack of memory.
        """
        require_device(device)
        config = load_model_config(folder)
        resolved = resolve_dtype(config, dtype)
        require_room_for_latents(config, resolved, device)
        length = _model_len(config, max_model_len)
        config = config.for_length(length)
        files = WeightFiles(folder, FAMILIES[config.family].tensor_names)
        need = memory_needed(config, dtype=dtype, num_blocks=num_blocks, block_size=block_size)
        free = available_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
        require_memory(need, free)
        torch.set_num_threads(num_threads)
        plan = plan_kv(config, resolved, block_size)
        identity = fingerprint(config, files.paths, resolved)
        layout = kv_layout(config, plan, dtype=resolved, fingerprint=identity)
        with files:
            model = load_model(
                files,
                config,
                plan,
                num_positions=length,
                dtype=TORCH_DTYPES[resolved],
                device=device,
            )
        spec = ModelSpec(
            name=served_name,
            vocab_size=config.vocab_size,
            max_model_len=length,
            eos_token_ids=config.eos_token_ids,
            layout=layout,
            groups=plan.groups,
            group_stages=kv_stages(config, plan, resolved, layout.block_bytes),
        )
        return cls(spec, model, plan, allocate_pool(layout, num_blocks, device), device)

    def use_static_steps(self, max_batch: int, bounds: CaptureBounds | None = None) -> None:
        """From now on computes decode steps without host work; captures them on a CUDA device.

        Args:
            max_batch: larger batches take the ordinary path; 0 sends all batches there.
            bounds: limits of the capture.
        """
        assert self._model is not None, "the runner is closed"
        self._static = None
        if not max_batch:
            return
        plan, spec = self._plan, self._spec
        inputs = StaticInputs(
            InputShape(
                max_batch=max_batch,
                max_tokens=spec.max_model_len,
                block_size=plan.block_size,
                groups=plan.groups,
                spare_block=self._pool.num_blocks,
            ),
            self._device,
        )
        step = StaticStep(self._model, inputs, self._pool.with_spare, plan)
        if self._device == "cpu":
            self._static = step
            return
        graphs = StepGraphs()
        with torch.inference_mode(), _current(self._device):
            inputs.send(max_batch)
            device = CudaGraphDevice(self._device)
            graphs.capture(
                step.compute, step.buckets, device, SystemClock(), bounds or CaptureBounds()
            )
        if graphs.buckets:
            step.replay_with(graphs)
            self._static = step

    @property
    def spec(self) -> ModelSpec:
        """See `ModelRunner.spec`."""
        return self._spec

    @property
    def kv(self) -> KvPool:
        """See `ModelRunner.kv`."""
        return self._pool

    @property
    def partial_attention(self) -> PoolAttention | None:
        """See `ModelRunner.partial_attention`."""
        return self._partial

    @property
    def pair_share(self) -> float:
        """See `ModelRunner.pair_share`."""
        return self._pair_share

    @property
    def adapter_places(self) -> None:
        """None: this engine's layers add no adapters."""
        return

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """See `ModelRunner.execute`."""
        assert self._model is not None, "the runner is closed"
        if not chunks:
            return StepResult([])
        with torch.inference_mode(), _current(self._device):
            if self._static is None or not self._static.takes(chunks):
                if chunks[0].pace is not None:
                    return self._execute_part(self._model, chunks)
                return self._execute_plain(self._model, chunks)
            chosen = self._static.execute(chunks)
            self._pool.computed()
            return StepResult(chosen)

    def _execute_plain(self, model: DecoderModel, chunks: Sequence[SequenceChunk]) -> StepResult:
        """Runs all rows through the layers together, and only rows to sample through the head."""
        result: list[SampledToken | None] = [None] * len(chunks)
        batch = build_batch(chunks, self._plan.block_size, self._plan.groups.windows)
        remote = [RemotePart(each.attention) for each in batch.remotes]
        rows = batch.sample_rows + _scored_rows(batch, chunks)
        num_sampled = len(batch.sample_rows)
        all_rows = rows == list(range(len(batch.token_ids)))
        device = torch.device(self._device)
        x, delta = model.forward(
            sent(batch.token_ids, torch.int64, device),
            sent(batch.positions, torch.int64, device),
            self._memory_of(batch, remote, self._progress_of(chunks)),
            None if all_rows else sent(rows, torch.int64, device),
        )
        self._pool.computed()
        if batch.sample_rows:
            logits = model.logits(x[:num_sampled], delta[:num_sampled])
            tokens = sample(logits, [chunks[index] for index in batch.sample_chunks])
            for index, token in zip(batch.sample_chunks, tokens, strict=True):
                result[index] = token
        failed = zip(batch.remote_chunks, remote, strict=True)
        lost = frozenset(index for index, part in failed if part.failure is not None)
        scores = self._score(chunks, batch, x[num_sampled:], delta[num_sampled:])
        return StepResult(result, scores, lost)

    def _execute_part(self, model: DecoderModel, chunks: Sequence[SequenceChunk]) -> StepResult:
        """Computes some pieces of a part; its next step resumes them."""
        (chunk,) = chunks

        def forward(piece: SequenceChunk, pauses: Pauses) -> tuple[torch.Tensor, torch.Tensor]:
            batch = build_batch([piece], self._plan.block_size, self._plan.groups.windows)
            return model.forward(
                batch.token_ids,
                batch.positions,
                self._memory_of(batch, [], pauses),
                torch.tensor([len(batch.token_ids) - 1]),
            )

        def choose(piece: SequenceChunk, x: torch.Tensor, delta: torch.Tensor) -> SampledToken:
            return sample(model.logits(x, delta), [piece])[0]

        run = self._parts.pop(chunk.sequence_id, None)
        if run is None:
            run = PartRun(chunk, self._spec.stages, forward, choose)
        try:
            needed = run.advance()
        except UpstreamLostError:
            run.close()
            return StepResult([None], lost=frozenset({0}))
        if run.is_done:
            return StepResult([run.token])
        self._parts[chunk.sequence_id] = run
        return StepResult([None], unfinished={0: needed})

    def _progress_of(self, chunks: Sequence[SequenceChunk]) -> StepProgress | None:
        """Returns the progress of a step with chunks that listen; None without such chunks.

        On a device the layers are only launched by then; the pool's event marks them.
        """
        listeners = [chunk.on_layers for chunk in chunks if chunk.on_layers is not None]
        if not listeners:
            return None

        def tell(num_stages: int) -> None:
            self._pool.computed()
            for listener in listeners:
                listener(num_stages)

        return StepProgress(self._spec.stages, tell)

    def _score(
        self,
        chunks: Sequence[SequenceChunk],
        batch: StepBatch,
        x: torch.Tensor,
        delta: torch.Tensor,
    ) -> dict[int, list[TokenLogprobs]]:
        """Computes log-probabilities of prompt tokens.

        Args:
            x, delta: [rows to score, hidden], chunk after chunk, from the model.
        """
        assert self._model is not None
        found: dict[int, list[TokenLogprobs]] = {}
        first = 0
        for index, _ in batch.scored:
            chunk = chunks[index]
            after = chunk.token_ids[chunk.start + 1 : chunk.start + 1 + chunk.num_scored]
            num_top = chunk.sampling.num_prompt_logprobs
            entries: list[TokenLogprobs] = []
            # Rows of logits are long: those of a whole prompt would not fit into memory.
            for begin in range(0, len(after), _SCORED_ROWS):
                ids = after[begin : begin + _SCORED_ROWS]
                rows = slice(first + begin, first + begin + len(ids))
                logits = self._model.logits(x[rows], delta[rows])
                entries += score_tokens(logits, ids, num_top)
            found[index] = entries
            first += len(after)
        return found

    def _memory_of(
        self,
        batch: StepBatch,
        remote: Sequence[RemotePart],
        watch: LayerWatch | None = None,
    ) -> StepMemory:
        pool, plan, shape = self._pool.tensor, self._plan, self._spec.layout
        states = None
        if batch.states:
            first = batch.groups[0]
            states = StepStates(
                batch.states,
                first.query_starts,
                first.num_decode,
                pool.view(len(pool), -1).view(torch.float32),
                watch,
            )
        if remote:
            (group,) = batch.groups
            return StepMemory(attention=(SplitAttention(group, pool, remote),))
        after_writes = [
            None if watch is None else partial(watch.written, group)
            for group in range(len(batch.groups))
        ]
        if not self._keeps_latents:
            attention = tuple(
                plan_attention(group, group_view(pool, heads), after_write)
                for group, heads, after_write in zip(
                    batch.groups, plan.heads, after_writes, strict=True
                )
            )
            return StepMemory(attention=attention, states=states)
        vectors = pool.view(len(pool), plan.block_layers, shape.block_size, -1)
        latent = tuple(
            StepLatent(group, vectors, after_write)
            for group, after_write in zip(batch.groups, after_writes, strict=True)
        )
        return StepMemory(latent=latent, states=states)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """See `ModelRunner.forget`; all but unfinished parts is in the blocks."""
        for sequence_id in sequence_ids:
            run = self._parts.pop(sequence_id, None)
            if run is not None:
                run.close()

    def close(self) -> None:
        """See `ModelRunner.close`."""
        self._model = self._static = None
        self._parts.clear()
        self._pool.close()


def _current(device: str) -> AbstractContextManager[object]:
    """Makes a device current in the calling thread, for kernel launches and events."""
    return nullcontext() if device == "cpu" else torch.cuda.device(device)


def _scored_rows(batch: StepBatch, chunks: Sequence[SequenceChunk]) -> list[int]:
    return [
        first + offset
        for index, first in batch.scored
        for offset in range(chunks[index].num_scored)
    ]


def _model_len(config: ModelConfig, asked: int | None) -> int:
    longest = config.max_position_embeddings
    if asked is None:
        return longest
    if not 0 < asked <= longest:
        raise ConfigError(f"max_model_len {asked} is not within the checkpoint's 1..{longest}")
    return asked
