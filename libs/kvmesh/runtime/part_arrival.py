"""A prompt's beginning that arrives in this worker's blocks from the worker that computes it.

Tests: tests/unit/runtime/test_part_arrival.py, tests/integration/test_prompt_chain.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvmesh.core.types import KvLayout, RequestId
from kvmesh.engine.layer_gate import LayerGate
from kvmesh.transfer.frames import BlockPart


class PartArrival:
    """Tracks the layers that are complete in all blocks.

    The engine may be reading complete layers, so they are never written again.

    Attributes:
        arriving: blocks that are written, in order.
        num_cached_blocks: number of the prompt's blocks before them.
        gate: the gate at which the engine waits for layers.
        reservation_id: set while the blocks are open to the writer.
        on_quiet: called once, when no writer uses the blocks or will use them.
    """

    def __init__(
        self,
        request_id: RequestId,
        attempt: int,
        arriving: Sequence[int],
        num_cached_blocks: int,
        layout: KvLayout,
        on_quiet: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.arriving = list(arriving)
        self.num_cached_blocks = num_cached_blocks
        self.gate = LayerGate()
        self.reservation_id: int | None = None
        self.on_quiet = on_quiet
        self._block_bytes = layout.block_bytes
        self._layer_bytes = layout.block_bytes // layout.num_layers
        self._leading = [0] * len(self.arriving)

    @property
    def is_complete(self) -> bool:
        """Whether all layers of all blocks have arrived."""
        return min(self._leading) == self._block_bytes

    def may_write(self, indexes: Sequence[int], part: BlockPart | None) -> bool:
        """Whether no byte of this part has arrived before."""
        begin = 0 if part is None else part.offset
        size = len(self._leading)
        return all(not 0 <= index < size or self._leading[index] <= begin for index in indexes)

    def wrote(self, indexes: Sequence[int], part: BlockPart | None) -> None:
        """Notes bytes that arrived in some blocks. Layers arrive in their order."""
        begin = 0 if part is None else part.offset
        end = self._block_bytes if part is None else part.offset + part.size
        for index in indexes:
            if self._leading[index] == begin:
                self._leading[index] = end
        self.gate.arrived(min(self._leading) // self._layer_bytes)
