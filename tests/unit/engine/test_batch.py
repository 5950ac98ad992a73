from __future__ import annotations

import pytest

from kvmesh.core.types import SamplingParams
from kvmesh.engine.batch import build_batch
from kvmesh.engine.protocol import SequenceChunk


def chunk(start: int, end: int, table: list[int], *, sample: bool = False) -> SequenceChunk:
    length = end if sample else end + 3
    tokens = [1000 * table[0] + position for position in range(length)]
    return SequenceChunk(0, tokens, start, end, table, 1, SamplingParams(), sample)


def test_decode_rows_come_first_and_longest_first() -> None:
    chunks = [
        chunk(4, 7, [1, 2], sample=True),
        chunk(2, 3, [3], sample=True),
        chunk(0, 2, [4]),
        chunk(9, 10, [5, 6, 7, 8], sample=True),
        chunk(5, 6, [9, 9]),
    ]
    batch = build_batch(chunks, block_size=4)
    assert batch.token_ids.tolist() == [5009, 9005, 3002, 1004, 1005, 1006, 4000, 4001]
    assert batch.positions.tolist() == [9, 5, 2, 4, 5, 6, 0, 1]
    assert batch.groups[0].query_starts == [0, 1, 2, 3, 6, 8]
    assert batch.groups[0].context_lens == [10, 6, 3, 7, 2]
    assert batch.groups[0].num_decode == 3
    # Tables reach as far as the context does; the fourth block is for growth.
    assert batch.groups[0].block_tables == [[5, 6, 7], [9, 9], [3], [1, 2], [4]]
    assert list(zip(batch.sample_rows, batch.sample_chunks, strict=True)) == [
        (0, 3),
        (2, 1),
        (5, 0),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        chunk(3, 3, [1]),
        chunk(0, 5, [1]),
        SequenceChunk(0, [1, 2], 0, 3, [1], 1, SamplingParams(), False),
        SequenceChunk(0, [1, 2, 3], 0, 2, [1], 1, SamplingParams(), True),
    ],
    ids=["empty", "table too short", "no such tokens", "samples in the middle"],
)
def test_wrong_chunks_are_our_bug(wrong: SequenceChunk) -> None:
    with pytest.raises(AssertionError):
        build_batch([wrong], block_size=4)
