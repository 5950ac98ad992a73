"""The decode step without host work: fixed input buffers, fixed output buffers.

A CUDA graph captures `StaticStep.compute`; on the CPU it is called directly. Steps with prompts,
with more rows than the largest bucket or with prompt scores take the ordinary path
(docs/adr/0015-static-decode-step.md). Tests: tests/unit/engine/test_static_step.py,
tests/integration/test_transformers_equality.py, tests/gpu/test_graphs.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvmesh.engine.kv_plan import KvPlan
from kvmesh.engine.kv_shape import group_view
from kvmesh.engine.layers import StepMemory
from kvmesh.engine.model import DecoderModel
from kvmesh.engine.noise import draw_rows
from kvmesh.engine.protocol import SampledToken, SequenceChunk
from kvmesh.engine.sampler import is_plain_draw, marked, sample, sampled
from kvmesh.engine.static_inputs import StaticInputs
from kvmesh.engine.step_graphs import StepGraphs
from kvmesh.kernels.static_decode import StaticAttention, StaticLatent, StaticStates
from kvmesh.kernels.upload import sent


def bucket_sizes(max_batch: int) -> tuple[int, ...]:
    """Returns the batch sizes that steps are rounded up to: powers of two, and `max_batch`."""
    assert max_batch > 0, "a step has a row"
    powers = [1 << power for power in range(max_batch.bit_length())]
    return tuple(sorted({*powers, max_batch}))


class StaticStep:
    """Computes batches of one token per sequence.

    Args:
        kv: the pool, including the spare block.
        plan: layout of its blocks.
    """

    def __init__(self, model: DecoderModel, inputs: StaticInputs, kv: Tensor, plan: KvPlan) -> None:
        self._model = model
        self._inputs = inputs
        self._kv = kv
        self._plan = plan
        shape = inputs.shape
        self.buckets = bucket_sizes(shape.max_batch)
        self._run: Callable[[int], None] = self.compute
        vocab = model.config.vocab_size
        self._logits = torch.zeros(
            (shape.max_batch, vocab), dtype=model.embedding.dtype, device=kv.device
        )
        self._drawn = torch.zeros(shape.max_batch, dtype=torch.int64, device=kv.device)
        self._results = torch.zeros(shape.max_batch, dtype=torch.int64, pin_memory=kv.is_cuda)
        self._done: torch.cuda.Event | None = None
        if kv.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay_with(self, graphs: StepGraphs) -> None:
        """From now on replays captured graphs, and takes only batches that have one."""
        self._run = graphs.replay
        self.buckets = graphs.buckets

    def takes(self, chunks: Sequence[SequenceChunk]) -> bool:
        """Returns whether a step can be computed this way."""
        return len(chunks) <= self.buckets[-1] and all(
            chunk.end - chunk.start == 1 and not chunk.num_scored and chunk.remote is None
            for chunk in chunks
        )

    def execute(self, chunks: Sequence[SequenceChunk]) -> list[SampledToken | None]:
        """Computes a step for which `takes` is true; see `ModelRunner.execute`."""
        bucket = self.buckets[bisect_left(self.buckets, len(chunks))]
        rows = self._inputs.fill(chunks, bucket)
        # Tokens that need more than noise and an argmax are sampled from the step's logits.
        others = [
            index for index, chunk in enumerate(chunks) if chunk.sample and not is_plain_draw(chunk)
        ]
        picked = self._inputs.pick([rows[index] for index in others])
        self._inputs.send(bucket)
        self._run(bucket)
        self._save_states(chunks)
        chosen: list[SampledToken] = []
        if others:
            logits = self._model.bent(self._logits.index_select(0, picked).float())
            chosen = sample(logits, [chunks[index] for index in others])
        drawn = self._read(bucket)
        tokens: list[SampledToken | None] = [
            sampled(drawn[row]) if chunk.sample else None
            for row, chunk in zip(rows, chunks, strict=True)
        ]
        for index, token in zip(others, chosen, strict=True):
            tokens[index] = token
        return tokens

    def compute(self, bucket: int) -> None:
        """Computes one step over the input buffers; never waits; all shapes are the bucket's."""
        inputs = self._inputs
        x, delta = self._model.forward(
            inputs.token_ids(bucket), inputs.positions(bucket), self._memory(bucket)
        )
        logits = self._model.head(self._model.normed(x, delta))
        self._logits[:bucket] = logits
        bent = self._model.bent(logits.float())
        temperature, low, high, is_random = inputs.sampling(bucket)
        drawn = draw_rows(bent / temperature, low, high, is_random)
        self._drawn[:bucket] = marked(bent, drawn)

    def _memory(self, bucket: int) -> StepMemory:
        inputs, kv, plan = self._inputs, self._kv, self._plan
        groups = inputs.shape.groups
        rows = [inputs.group(group, bucket) for group in range(len(groups.windows))]
        states = None
        if groups.state_blocks:
            live, source, fresh = inputs.states(bucket)
            states = StaticStates(live, source, fresh, kv.view(len(kv), -1).view(torch.float32))
        if self._model.config.latent is None:
            attention = tuple(
                StaticAttention(each, group_view(kv, heads))
                for each, heads in zip(rows, plan.heads, strict=True)
            )
            return StepMemory(attention=attention, states=states)
        vectors = kv.view(len(kv), plan.block_layers, inputs.shape.block_size, -1)
        latent = tuple(StaticLatent(each, vectors) for each in rows)
        return StepMemory(latent=latent, states=states)

    def _save_states(self, chunks: Sequence[SequenceChunk]) -> None:
        """Copies states to be saved from the live ones, whole blocks at once."""
        live: list[int] = []
        saved: list[int] = []
        for chunk in chunks:
            if chunk.state is not None:
                for _, blocks in chunk.state.saves:
                    live += chunk.state.live
                    saved += blocks
        if saved:
            pairs = sent([live, saved], torch.int64, self._kv.device)
            self._kv[pairs[1]] = self._kv[pairs[0]]

    def _read(self, bucket: int) -> list[int]:
        """Waits for the device and returns the drawn tokens; only this thread waits."""
        results = self._results[:bucket]
        results.copy_(self._drawn[:bucket], non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        found: list[int] = results.tolist()
        return found
