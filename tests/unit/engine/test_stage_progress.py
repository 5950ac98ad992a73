from __future__ import annotations

import pytest

from kvmesh.engine.stage_progress import StageProgress, StepProgress
from kvmesh.kv.stages import Stage, state_kind

STAGES = (
    Stage(state_kind(0), 0, 32),
    Stage(0, 0, 64),
    Stage(state_kind(0), 32, 32),
    Stage(1, 0, 64),
)


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ((0, 1, 2, 3), [1, 2, 3, 4]),
        ((1, 0, 3, 2), [2, 4]),  # attention before the state of the same layer
        ((3, 2, 1, 0), [4]),
        ((0, 0, 1, 0), [1, 2]),
    ],
)
def test_only_leading_stages_count(order: tuple[int, ...], told: list[int]) -> None:
    found: list[int] = []
    progress = StageProgress(STAGES, found.append)
    for stage in order:
        progress.complete(stage)
    assert found == told


def test_a_state_is_complete_once_it_is_written() -> None:
    found: list[int] = []
    progress = StepProgress(STAGES, found.append)
    progress.before_states(0, 0)
    assert not found
    progress.after_states(0, 0)
    progress.written(0, 0)
    progress.before_states(0, 1)
    assert found == [1, 2]
    progress.after_states(0, 1)
    progress.written(1, 0)
    assert found == [1, 2, 3, 4]
