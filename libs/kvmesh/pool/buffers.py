"""Buffers of the pool's data calls: the queries of a batch, and new KV.

Tests: tests/integration/test_pool_facade.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmesh.core.kv_formats import KV_DTYPE_BYTES
from kvmesh.core.types import KvLayout, Reservation
from kvmesh.engine.host_memory import HostMemory
from kvmesh.runtime.borrowed_leases import lease_of
from kvmesh.transfer.asker import Asker
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.remote_attention import PartialAnswer
from kvmesh.transfer.remote_blocks import RemoteBlocks
from kvmesh.v1 import kv_pool_service_pb2 as pb


class QueryBuffer:
    """Queries of one layer at a time to blocks that the holder keeps until the buffer is closed.

    Args:
        message: lease of the blocks.
        shape: number of queries, heads and head_dim.

    Attributes:
        queries: memory to write before each `query`: [queries, heads, head_dim] in the layout's
            dtype, with rotary embedding applied.
        num_tokens: number of positions that the queries attend to.
    """

    def __init__(
        self, asker: Asker, message: pb.ReadLease, shape: tuple[int, int, int], layout: KvLayout
    ) -> None:
        self.num_tokens = message.num_blocks * layout.block_size
        self._shape = shape
        self._scale = shape[2] ** -0.5
        size = math.prod(shape) * KV_DTYPE_BYTES[layout.dtype]
        self.queries = memoryview(bytearray(size))
        holder = Holder.of_lease(lease_of(message))
        self._blocks = RemoteBlocks(asker, holder, range(message.num_blocks))

    def attend(self, layer: int) -> PartialAnswer:
        """Returns the attention of the queries in the buffer; blocks the calling thread.

        Raises:
            RefusedError: the holder refused.
            LostError: the holder did not answer.
        """
        return self._blocks.ask(layer, self.queries, self._shape, self._scale).wait()


@dataclass(frozen=True, slots=True)
class KvBuffer:
    """New KV to be stored in the pool.

    Attributes:
        reservation: blocks reserved at the target; None if it holds the whole prefix.
    """

    memory: HostMemory
    reservation: Reservation | None
    num_blocks: int

    @property
    def first_block(self) -> int:
        """Index in the prefix of the first block of the buffer."""
        return 0 if self.reservation is None else self.reservation.num_cached_blocks

    @property
    def blocks(self) -> memoryview:
        """Memory of the missing blocks, in the order of the layout, to write before `put`."""
        return self.memory.write_view(0, self.num_blocks)
