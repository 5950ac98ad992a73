"""Reports the stages of a prompt that are computed, whatever the order in which layers end.

Tests: tests/unit/engine/test_stage_progress.py, tests/integration/test_layered_handoff.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvmesh.kernels.states import StateWatch
from kvmesh.kv.stages import Stages, state_kind


class LayerWatch(StateWatch, Protocol):
    """Told of each layer of a step."""

    def written(self, group: int, slot: int) -> None:
        """Called after the layer has written the keys and values of the step's rows.

        Args:
            group: token group of the layer.
            slot: place of the layer in the group's blocks.
        """
        ...


class StageProgress:
    """Counts the leading stages that are complete for all positions of a prompt.

    Args:
        stages: stages of the model.
        tell: called with the number of leading complete stages when it has grown.
    """

    def __init__(self, stages: Stages, tell: Callable[[int], None]) -> None:
        # A layer's slot is its place among the stages of its kind.
        self._numbers: dict[int, list[int]] = {}
        for number, stage in enumerate(stages):
            self._numbers.setdefault(stage.kind, []).append(number)
        self._done: set[int] = set()
        self._num_done = 0
        self._tell = tell

    def number_of(self, kind: int, slot: int) -> int:
        """Returns the number of the stage of a layer."""
        return self._numbers[kind][slot]

    def complete(self, stage: int) -> None:
        """Records that a stage is complete. Repeated calls have no effect."""
        self._done.add(stage)
        if self._num_done in self._done:
            while self._num_done in self._done:
                self._num_done += 1
            self._tell(self._num_done)


class StepProgress:
    """The progress of a step that computes all remaining positions of a prompt in each layer.

    It is a `LayerWatch`.
    """

    def __init__(self, stages: Stages, tell: Callable[[int], None]) -> None:
        self._progress = StageProgress(stages, tell)

    def written(self, group: int, slot: int) -> None:
        """See `LayerWatch`."""
        self._progress.complete(self._progress.number_of(group, slot))

    def before_states(self, part: int, slot: int) -> None:
        """See `StateWatch`; nothing is complete yet."""

    def after_states(self, part: int, slot: int) -> None:
        """See `StateWatch`."""
        self._progress.complete(self._progress.number_of(state_kind(part), slot))
