"""Shape of one step for attention, in host memory: rows, contexts and block tables.

Rows are the tokens of a step, sequence after sequence. Sequences with one row (decode steps) come
first, so that a batch is a run of decode rows followed by prefill chunks.
Tests: tests/unit/kernels/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Padding below this many blocks in a bucket is cheaper than the calls of another bucket.
_PADDING_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The sequences of one step.

    Attributes:
        query_starts: first row of each sequence, then the number of rows; ascending from 0.
        context_lens: number of positions each sequence attends to, ending with its own rows.
        block_tables: per sequence `ceil(context_len / block_size)` block ids.
        num_decode: number of leading sequences that have exactly one row.
        block_size: positions in a block.
    """

    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    num_decode: int
    block_size: int

    def __post_init__(self) -> None:
        assert len(self.query_starts) == self.num_sequences + 1
        assert len(self.block_tables) == self.num_sequences

    @property
    def num_sequences(self) -> int:
        """Number of sequences in the step."""
        return len(self.context_lens)

    @property
    def num_rows(self) -> int:
        """Number of tokens in the step."""
        return self.query_starts[-1]

    def query_len(self, sequence: int) -> int:
        """Returns the number of rows of one sequence."""
        return self.query_starts[sequence + 1] - self.query_starts[sequence]


def padded_tables(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Returns block tables as one array, padded with the first block of the longest table.

    Where there is padding that block is full, so padding gathers finite values.

    Returns:
        [num_sequences, longest table] int64.
    """
    longest = max(tables, key=len, default=())
    out = np.full((len(tables), len(longest)), longest[0] if longest else 0, dtype=np.int64)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def slots_of(batch: RaggedBatch) -> npt.NDArray[np.int64]:
    """Returns the slot (block id x block size + offset) of each row.

    Returns:
        [num_rows] int64.
    """
    size = batch.block_size
    out = np.empty(batch.num_rows, dtype=np.int64)
    for sequence in range(batch.num_sequences):
        first, last = batch.query_starts[sequence], batch.query_starts[sequence + 1]
        end = batch.context_lens[sequence]
        table = batch.block_tables[sequence]
        if last - first == 1:
            out[first] = table[(end - 1) // size] * size + (end - 1) % size
            continue
        positions = np.arange(end - (last - first), end)
        out[first:last] = np.asarray(table)[positions // size] * size + positions % size
    return out


def decode_buckets(num_blocks: Sequence[int]) -> Iterator[range]:
    """Splits decode sequences into runs of similar length, so that gathers have little padding.

    Args:
        num_blocks: number of blocks of each sequence's context, descending except for single
            blocks: a window spans one block more unless it begins at a block boundary.

    Yields:
        Runs of sequence indices that cover all of them in order.
    """
    first = 0
    wasted = 0
    for index, count in enumerate(num_blocks):
        assert index == 0 or count <= num_blocks[index - 1] + 1, "buckets need descending lengths"
        missing = num_blocks[first] - count
        if missing * 2 > num_blocks[first] and wasted + missing > _PADDING_BLOCKS:
            yield range(first, index)
            first, wasted, missing = index, 0, 0
        wasted += missing
    if num_blocks:
        yield range(first, len(num_blocks))
