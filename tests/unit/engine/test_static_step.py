"""Which steps are static, and how batches are rounded up."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core.types import SamplingParams
from kvmesh.engine.protocol import SequenceChunk
from kvmesh.engine.runner import TorchRunner
from kvmesh.engine.static_step import bucket_sizes
from tests.unit.engine.tiny_checkpoint import write_checkpoint

ONE = SequenceChunk(1, [3, 4, 5], 2, 3, [0], 3, SamplingParams(temperature=0.0), sample=True)


@pytest.mark.parametrize(
    ("max_batch", "sizes"),
    [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (32, (1, 2, 4, 8, 16, 32))],
)
def test_buckets(max_batch: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(max_batch) == sizes


@pytest.fixture
def runner(tmp_path: Path) -> TorchRunner:
    runner = TorchRunner.load(
        write_checkpoint(tmp_path), served_name="tiny", num_blocks=8, block_size=4
    )
    runner.use_static_steps(3)
    return runner


def test_steps_of_one_token_each_are_taken(runner: TorchRunner) -> None:
    step = runner._static
    assert step is not None
    others = [replace(ONE, sequence_id=number) for number in range(4)]
    assert step.takes(others[:3])
    assert not step.takes(others)
    assert not step.takes([ONE, replace(ONE, start=0)])
    scored = replace(ONE, start=0, end=1, sample=False, score_prompt=True)
    assert not step.takes([scored])
    assert step.takes([replace(scored, score_prompt=False)])


def test_a_row_that_is_not_sampled_gives_no_token(runner: TorchRunner) -> None:
    quiet = replace(ONE, sequence_id=2, end=3, sample=False, token_ids=[3, 4, 5, 6])
    first, second = runner.execute([quiet, ONE]).tokens
    assert first is None
    assert second is not None


@pytest.mark.parametrize("max_batch", [0, 3])
def test_kv_that_is_no_number_is_told_of_its_row_alone(runner: TorchRunner, max_batch: int) -> None:
    runner.use_static_steps(max_batch)
    runner.kv.tensor[0].fill_(math.nan)
    well = replace(ONE, sequence_id=2, block_table=[1])
    ill, fine = runner.execute([ONE, well]).tokens
    assert ill is not None
    assert fine is not None
    assert (ill.damaged, fine.damaged) == (True, False)


def test_no_static_steps_when_they_are_switched_off(runner: TorchRunner) -> None:
    runner.use_static_steps(0)
    assert runner._static is None
