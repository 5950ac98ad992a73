"""Flattens the chunks of a step into rows: tokens, positions, attention batch, rows to sample.

Tests: tests/unit/engine/test_batch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvmesh.engine.protocol import RemotePrefix, SequenceChunk
from kvmesh.kernels.plan import RaggedBatch
from kvmesh.kernels.states import SequenceState
from kvmesh.kv.groups import HOLE, first_visible, num_blocks_of


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step, flattened to rows.

    Attributes:
        token_ids, positions: [rows] int64, host memory.
        groups: per token group the rows' sequences, single-row ones first and longest first.
            Blocks that no query sees are left out, so contexts of a window start late.
        states: blocks of each sequence's states in the same order, if there are linear layers.
        sample_rows: rows whose logits are wanted.
        sample_chunks: for each of them, the index of its chunk in the step.
        scored: (index of the chunk, its first row) of chunks with prompt tokens to score.
        remote_chunks, remotes: indexes of the chunks with a remote prefix, and the prefixes. Their
            sequences come last, and their contexts and tables exclude the prefix.
    """

    token_ids: Tensor
    positions: Tensor
    groups: list[RaggedBatch]
    states: list[SequenceState]
    sample_rows: list[int]
    sample_chunks: list[int]
    scored: list[tuple[int, int]]
    remote_chunks: list[int]
    remotes: list[RemotePrefix]


def build_batch(
    chunks: Sequence[SequenceChunk], block_size: int, windows: Sequence[int] = (0,)
) -> StepBatch:
    """Flattens a step.

    Args:
        chunks: chunks of the step, at least one.
        windows: windows of the token groups.
    """
    assert chunks, "a step has a chunk"
    for chunk in chunks:
        _check(chunk, block_size, windows)
    remote = [index for index, chunk in enumerate(chunks) if chunk.remote is not None]
    local = [(i, chunk) for i, chunk in enumerate(chunks) if chunk.remote is None]
    single = [index for index, chunk in local if chunk.end - chunk.start == 1]
    longer = [index for index, chunk in local if chunk.end - chunk.start > 1]
    # Neighbours of similar length share one gather (`decode_buckets`).
    single.sort(key=lambda index: -chunks[index].end)
    order = single + longer + remote

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
        groups=[
            _group_batch([chunks[index] for index in order], starts, group, window, block_size)
            for group, window in enumerate(windows)
        ],
        states=[
            SequenceState(
                live=state.live,
                source=state.source,
                saves=[
                    (position - chunks[index].start, blocks) for position, blocks in state.saves
                ],
            )
            for index in order
            if (state := chunks[index].state) is not None
        ],
        sample_rows=[starts[place + 1] - 1 for place in sampled],
        sample_chunks=[order[place] for place in sampled],
        scored=[(index, starts[at]) for at, index in enumerate(order) if chunks[index].num_scored],
        remote_chunks=remote,
        remotes=[prefix for chunk in chunks if (prefix := chunk.remote) is not None],
    )


def _group_batch(
    chunks: Sequence[SequenceChunk],
    starts: list[int],
    group: int,
    window: int,
    block_size: int,
) -> RaggedBatch:
    first = [first_visible(window, chunk.start, block_size) for chunk in chunks]
    ends = [num_blocks_of(chunk.end, block_size) for chunk in chunks]
    return RaggedBatch(
        query_starts=starts,
        context_lens=[
            chunk.end - (skipped + _num_elsewhere(chunk)) * block_size
            for chunk, skipped in zip(chunks, first, strict=True)
        ],
        block_tables=[
            _table(chunk, group, begin, end)
            for chunk, begin, end in zip(chunks, first, ends, strict=True)
        ],
        num_decode=sum(chunk.end - chunk.start == 1 and chunk.remote is None for chunk in chunks),
        block_size=block_size,
    )


def _num_elsewhere(chunk: SequenceChunk) -> int:
    return 0 if chunk.remote is None else len(chunk.remote.blocks)


def _table(chunk: SequenceChunk, group: int, begin: int, end: int) -> Sequence[int]:
    """Returns the blocks of a chunk's context on this worker."""
    table = chunk.tables[group]
    if chunk.remote is None:
        return table[begin:end]
    elsewhere = chunk.remote.blocks
    return [*table[: elsewhere.start], *table[elsewhere.stop : end]]


def _check(chunk: SequenceChunk, block_size: int, windows: Sequence[int]) -> None:
    assert 0 <= chunk.start < chunk.end <= len(chunk.token_ids), "the chunk has no such tokens"
    assert len(chunk.tables) == len(windows), "a group has no table"
    for window, table in zip(windows, chunk.tables, strict=True):
        assert chunk.end <= len(table) * block_size, "the block table is too short"
        first = first_visible(window, chunk.start, block_size)
        seen = table[first : num_blocks_of(chunk.end, block_size)]
        assert not window or HOLE not in seen, "a block that is seen is not held"
        assert not window or chunk.remote is None, "a window is not asked for elsewhere"
    assert not chunk.sample or chunk.end == len(chunk.token_ids), "tokens follow the sampled one"
