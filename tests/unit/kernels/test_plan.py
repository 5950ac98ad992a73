from __future__ import annotations

import pytest

from kvmesh.kernels.plan import RaggedBatch, decode_buckets, padded_tables, slots_of


def test_tables_are_padded_with_a_block_that_is_full() -> None:
    assert padded_tables([[2], [7, 3, 5]]).tolist() == [[2, 7, 7], [7, 3, 5]]
    assert padded_tables([]).shape == (0, 0)


def test_slots_follow_the_block_tables() -> None:
    batch = RaggedBatch(
        query_starts=[0, 1, 4],
        context_lens=[5, 6],
        block_tables=[[9, 4], [2, 0]],
        num_decode=1,
        block_size=4,
    )
    # Position 4 of table [9, 4]; positions 3, 4 and 5 of table [2, 0].
    assert slots_of(batch).tolist() == [4 * 4 + 0, 2 * 4 + 3, 0 * 4 + 0, 0 * 4 + 1]
    assert (batch.num_rows, batch.query_len(1)) == (4, 3)


@pytest.mark.parametrize(
    ("num_blocks", "buckets"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([40, 39, 38], [(0, 3)]),
        ([200, 190, 10, 9], [(0, 2), (2, 4)]),  # 180 blocks of padding cost more than a call
        ([20, 2, 1], [(0, 3)]),  # short ones are not worth a call
        ([400, 150, 10], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_decode_buckets(num_blocks: list[int], buckets: list[tuple[int, int]]) -> None:
    assert [(run.start, run.stop) for run in decode_buckets(num_blocks)] == buckets
