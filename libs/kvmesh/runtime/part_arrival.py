"""A prompt's beginning that arrives in this worker's blocks from the worker that computes it.

Tests: tests/unit/runtime/test_part_arrival.py, tests/integration/test_prompt_chain.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmesh.core.types import RequestId
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.kv.stages import Stages
from kvmesh.transfer.frames import BlockPart


class PartArrival:
    """Tracks the stages that are complete in all blocks.

    The engine may read complete stages, so they no longer change.

    Args:
        arriving: blocks that the other worker writes, in order.
        kinds: kind of each of these blocks, see `ArrivingBlock`.
        num_cached_blocks: number of the prompt's blocks before them.
        stages: stages of the model.

    Attributes:
        gate: gate at which the engine waits for stages.
        reservation_id: reservation of the blocks while the writer may write; else None.
        on_quiet: called once, when nobody writes into the blocks any more.
    """

    def __init__(
        self,
        request_id: RequestId,
        attempt: int,
        arriving: Sequence[int],
        kinds: Sequence[int],
        num_cached_blocks: int,
        stages: Stages,
        gate: LayerGate,
        on_quiet: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.arriving = list(arriving)
        self.num_cached_blocks = num_cached_blocks
        self.gate = gate
        self.reservation_id: int | None = None
        self.on_quiet = on_quiet
        self._stages = stages
        self._block_bytes = max(stage.end for stage in stages)
        self._leading = [0] * len(self.arriving)
        self._of_kind: dict[int, list[int]] = {stage.kind: [] for stage in stages}
        for index, kind in enumerate(kinds):
            self._of_kind[kind].append(index)
        self._num_stages = 0

    @property
    def is_complete(self) -> bool:
        """Whether all stages of all blocks have arrived."""
        return self._num_stages == len(self._stages)

    def may_write(self, indexes: Sequence[int], part: BlockPart | None) -> bool:
        """Whether no byte of this part has arrived before."""
        begin = 0 if part is None else part.offset
        size = len(self._leading)
        return all(not 0 <= index < size or self._leading[index] <= begin for index in indexes)

    def wrote(self, indexes: Sequence[int], part: BlockPart | None) -> None:
        """Records bytes that arrived in some blocks; those of one block arrive in order."""
        begin = 0 if part is None else part.offset
        end = self._block_bytes if part is None else part.offset + part.size
        for index in indexes:
            if self._leading[index] == begin:
                self._leading[index] = end
        leading = {
            kind: min([self._leading[index] for index in members], default=self._block_bytes)
            for kind, members in self._of_kind.items()
        }
        while not self.is_complete:
            stage = self._stages[self._num_stages]
            if leading[stage.kind] < stage.end:
                break
            self._num_stages += 1
        self.gate.arrived(self._num_stages)
