"""Buffers of a static step: what a batch writes there, and what it leaves behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import SamplingParams
from kvmesh.engine.noise import key_halves, stream_key
from kvmesh.engine.protocol import SequenceChunk, StateChunk
from kvmesh.engine.static_inputs import InputShape, RowPlaces, StaticInputs
from kvmesh.kv.groups import HOLE

SPARE = 99
SHAPE = InputShape(4, 64, 8, KvGroups((0, 16), state_blocks=2), SPARE)


def chunk(sequence: int, start: int, first_block: int, fresh: bool = False) -> SequenceChunk:
    blocks = start // 8 + 1
    behind = max(0, start - 15) // 8
    state = [first_block + 40, first_block + 41]
    return SequenceChunk(
        sequence_id=sequence,
        token_ids=list(range(100, 101 + start)),
        start=start,
        end=start + 1,
        block_table=[first_block + index for index in range(blocks)],
        num_prompt_tokens=1,
        sampling=SamplingParams(temperature=sequence / 2, seed=7 * sequence),
        sample=True,
        more_tables=[[HOLE] * behind + [first_block + 20 + i for i in range(behind, blocks)]],
        state=StateChunk(state, [] if fresh else [first_block + 50, first_block + 51]),
    )


def test_rows_of_a_batch_and_spare_ones() -> None:
    inputs = StaticInputs(SHAPE, "cpu")
    chunks = [chunk(0, 30, 0), chunk(1, 7, 10, fresh=True), chunk(2, 8, 20)]
    assert inputs.fill(chunks, 4) == [0, 1, 2]
    picked = inputs.pick([2, 0])
    inputs.send(4)
    assert picked.tolist() == [2, 0]
    assert inputs.token_ids(4).tolist() == [130, 107, 108, 0]
    assert inputs.positions(4).tolist() == [30, 7, 8, 0]
    whole, window = inputs.group(0, 4), inputs.group(1, 4)
    assert whole.slots.tolist() == [3 * 8 + 6, 10 * 8 + 7, 21 * 8, SPARE * 8]
    assert whole.lens.tolist() == [31, 8, 9, 1]
    assert whole.tables.shape == (4, 8)
    assert [whole.tables[row, 0].item() for row in range(4)] == [0, 10, 20, SPARE]
    assert whole.tables[0, :4].tolist() == [0, 1, 2, 3]
    # The query at 30 sees positions from 15 on, which are in blocks 1 to 3.
    assert window.tables.shape == (4, 3)
    assert window.tables[0].tolist() == [21, 22, 23]
    assert window.lens.tolist() == [23, 8, 9, 1]
    assert window.slots.tolist() == [23 * 8 + 6, 30 * 8 + 7, 41 * 8, SPARE * 8]
    live, source, fresh = inputs.states(4)
    assert live.tolist() == [[40, 41], [50, 51], [60, 61], [SPARE, SPARE]]
    assert source.tolist() == [[50, 51], [50, 51], [70, 71], [SPARE, SPARE]]
    assert fresh.tolist() == [False, True, False, True]
    temperature, low, high, is_random = inputs.sampling(4)
    assert temperature.tolist() == [[1.0], [0.5], [1.0], [1.0]]
    assert is_random.tolist() == [0, 1, 1, 0]
    halves = list(zip(low.tolist(), high.tolist(), strict=True))
    assert halves[1] == key_halves(stream_key(7, 8))
    assert halves[2] == key_halves(stream_key(14, 9))
    assert low.dtype == torch.int32


def test_a_smaller_batch_after_a_larger_one_leaves_no_row_behind() -> None:
    inputs = StaticInputs(SHAPE, "cpu")
    inputs.fill([chunk(1, 9, 0), chunk(2, 9, 10), chunk(3, 9, 20)], 4)
    inputs.send(4)
    rows = inputs.fill([chunk(3, 10, 20)], 2)
    inputs.send(2)
    assert rows == [0]
    assert inputs.token_ids(2).tolist() == [110, 0]
    rows_of = inputs.group(0, 2)
    assert rows_of.tables[:, 0].tolist() == [20, SPARE]
    assert rows_of.slots.tolist() == [21 * 8 + 2, SPARE * 8]


def test_tables_that_change_are_written_again() -> None:
    inputs = StaticInputs(SHAPE, "cpu")
    generator = random.Random(3)
    for _ in range(40):
        chosen = generator.sample(range(1, 7), generator.randint(1, 4))
        chunks = [
            chunk(each, generator.randrange(64), generator.choice([0, 100])) for each in chosen
        ]
        rows = inputs.fill(chunks, 4)
        inputs.send(4)
        assert sorted(rows) == list(range(len(chunks)))
        for row, done in zip(rows, chunks, strict=True):
            table = inputs.group(0, 4).tables[row, : len(done.block_table)]
            assert table.tolist() == done.block_table
        spare = inputs.group(0, 4)
        assert spare.tables[len(chunks) :, 0].tolist() == [SPARE] * (4 - len(chunks))


@pytest.mark.parametrize(
    ("before", "after", "rows"),
    [
        ([], [5, 3], [0, 1]),
        ([1, 2, 3], [1, 2, 3], [0, 1, 2]),
        ([1, 2, 3], [3, 2, 1], [2, 1, 0]),
        ([1, 2, 3], [2, 3], [1, 0]),
        ([1, 2], [7, 2, 1], [2, 1, 0]),
        ([1, 2, 3], [9], [0]),
    ],
)
def test_sequences_keep_their_rows(before: list[int], after: list[int], rows: list[int]) -> None:
    places = RowPlaces()
    places.assign(before)
    assert places.assign(after) == rows


def test_a_temperature_near_zero_divides_no_logit_to_infinity() -> None:
    inputs = StaticInputs(SHAPE, "cpu")
    tiny = replace(chunk(1, 7, 10), sampling=SamplingParams(temperature=1e-45))
    inputs.fill([tiny], 1)
    inputs.pick([])
    inputs.send(1)
    divisors, _, _, is_random = inputs.sampling(1)
    assert is_random.tolist() == [1]
    assert torch.isfinite(1000.0 / divisors).all()
