"""Turns the chunks of a step into rows: tokens, positions, the attention batch, rows to sample.

Tests: tests/unit/engine/test_batch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvmesh.engine.protocol import SequenceChunk
from kvmesh.kernels.plan import RaggedBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step, flattened.

    Attributes:
        token_ids, positions: [rows] int64, host memory.
        attention: the rows' sequences, those with one row first and longest first.
        sample_rows: rows whose logits are wanted.
        sample_chunks: for each of them, the index of its chunk in the step.
        scored: (index of the chunk, its first row) of chunks with prompt tokens to score.
    """

    token_ids: Tensor
    positions: Tensor
    attention: RaggedBatch
    sample_rows: list[int]
    sample_chunks: list[int]
    scored: list[tuple[int, int]]


def build_batch(chunks: Sequence[SequenceChunk], block_size: int) -> StepBatch:
    """Flattens a step; `chunks` must not be empty."""
    assert chunks, "a step has a chunk"
    for chunk in chunks:
        _check(chunk, block_size)
    single = [index for index, chunk in enumerate(chunks) if chunk.end - chunk.start == 1]
    longer = [index for index, chunk in enumerate(chunks) if chunk.end - chunk.start > 1]
    # Neighbours of similar length share a gather (`decode_buckets`).
    single.sort(key=lambda index: -chunks[index].end)
    order = single + longer

    starts = [0]
    for index in order:
        starts.append(starts[-1] + chunks[index].end - chunks[index].start)
    tokens = np.empty(starts[-1], dtype=np.int64)
    positions = np.empty(starts[-1], dtype=np.int64)
    for first, index in zip(starts, order, strict=False):
        chunk = chunks[index]
        length = chunk.end - chunk.start
        tokens[first : first + length] = chunk.token_ids[chunk.start : chunk.end]
        positions[first : first + length] = range(chunk.start, chunk.end)

    sampled = [place for place, index in enumerate(order) if chunks[index].sample]
    return StepBatch(
        token_ids=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        attention=RaggedBatch(
            query_starts=starts,
            context_lens=[chunks[index].end for index in order],
            block_tables=[
                chunks[index].block_table[: -(-chunks[index].end // block_size)] for index in order
            ],
            num_decode=len(single),
            block_size=block_size,
        ),
        sample_rows=[starts[place + 1] - 1 for place in sampled],
        sample_chunks=[order[place] for place in sampled],
        scored=[(index, starts[at]) for at, index in enumerate(order) if chunks[index].num_scored],
    )


def _check(chunk: SequenceChunk, block_size: int) -> None:
    assert 0 <= chunk.start < chunk.end <= len(chunk.token_ids), "the chunk has no such tokens"
    assert chunk.end <= len(chunk.block_table) * block_size, "the block table is too short"
    assert not chunk.sample or chunk.end == len(chunk.token_ids), "tokens follow the sampled one"
