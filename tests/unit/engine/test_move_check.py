"""The check of a device tells an engine whose KV moves from one that keeps some of it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvmesh.core.errors import ConfigError
from kvmesh.engine.divided_pool import DividedPool
from kvmesh.engine.move_check import require_moves
from kvmesh.engine.protocol import SequenceChunk, StepResult
from tests.ranked_engine import BLOCK_SIZE, RankedRunner


class KeepsElsewhere(RankedRunner):
    """Its KV is always in the same blocks, whatever the table says."""

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """See `ModelRunner.execute`."""
        kept = [replace(each, block_table=range(len(each.block_table))) for each in chunks]
        return super().execute(kept)


class Forgets(RankedRunner):
    """It knows which sequences have ended."""

    def __init__(self) -> None:
        super().__init__(10, 2, memory="devices")
        self.alive: set[int] = set()

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """See `ModelRunner.execute`."""
        self.alive |= {each.sequence_id for each in chunks}
        return super().execute(chunks)

    def forget(self, sequence_ids: Sequence[int]) -> None:
        """See `ModelRunner.forget`."""
        self.alive -= set(sequence_ids)


def pool_of(runner: RankedRunner) -> DividedPool:
    assert isinstance(runner.kv, DividedPool)
    return runner.kv


@pytest.mark.parametrize("max_tokens", [BLOCK_SIZE // 2, 512])
@pytest.mark.parametrize(("tensor_parallel", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_an_engine_whose_kv_moves_passes(
    tensor_parallel: int, stages: int, max_tokens: int
) -> None:
    runner = RankedRunner(10, tensor_parallel, stages, memory="devices")
    require_moves(runner, pool_of(runner), max_tokens)


def test_no_sequence_is_left() -> None:
    runner = Forgets()
    require_moves(runner, pool_of(runner), 512)
    assert not runner.alive


def test_an_engine_that_keeps_kv_elsewhere_is_refused() -> None:
    runner = KeepsElsewhere(10, 2, memory="devices")
    with pytest.raises(ConfigError, match="its KV is not in the blocks that workers exchange"):
        require_moves(runner, pool_of(runner), 512)


def test_a_pool_that_two_sequences_do_not_fit_in_is_refused() -> None:
    runner = RankedRunner(3, 2, memory="devices")
    with pytest.raises(ConfigError, match="a pool of 3 blocks is too small: take 4"):
        require_moves(runner, pool_of(runner), 512)
