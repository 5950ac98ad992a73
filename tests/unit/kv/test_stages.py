from __future__ import annotations

import pytest

from kvmesh.core.kv_groups import KvGroups
from kvmesh.kv.stages import Stage, joined, plain_stages, state_kind, tiled, whole_stages


def test_a_plain_block_has_its_layers_in_their_order() -> None:
    assert plain_stages(2, 64) == (Stage(0, 0, 32), Stage(0, 32, 32))


def test_stages_are_whole_blocks_together() -> None:
    """What no layer fills leaves with the layer before it."""
    begins = [(state_kind(0), 0), (0, 0), (state_kind(0), 24), (1, 0), (0, 32)]
    stages = tiled(begins, 64)
    assert [stage.size for stage in stages] == [24, 32, 40, 64, 32]
    for kind in {stage.kind for stage in stages}:
        assert sum(stage.size for stage in stages if stage.kind == kind) == 64


def test_layers_that_are_not_in_the_order_of_their_block_are_no_stages() -> None:
    with pytest.raises(AssertionError):
        tiled([(0, 32), (0, 0)], 64)


def test_an_engine_that_fills_blocks_at_once_has_a_stage_for_each_kind() -> None:
    groups = KvGroups(windows=(0, 32), state_blocks=2)
    assert [stage.kind for stage in whole_stages(groups, 64)] == [0, 1, -1, -2]


def test_stages_of_a_kind_leave_together() -> None:
    stages = (Stage(0, 0, 8), Stage(-1, 0, 4), Stage(0, 8, 8))
    assert joined(stages) == [Stage(0, 0, 16), Stage(-1, 0, 4)]
