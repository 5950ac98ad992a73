"""What the pool's data calls read from and write to: queries of one batch, new KV of another.

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
    """Queries of one layer at a time, for blocks that stay where they are until it is closed.

    Args:
        message: the lease of the blocks.
        shape: queries, heads, head_dim.

    Attributes:
        queries: to be written before each `query`: [queries, heads, head_dim] in the layout's
            dtype, rotated.
        num_tokens: positions that they attend to.
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
        """Attention of what is in `queries`; blocks its thread.

        Raises:
            RefusedError: the holder said no.
            LostError: it did not answer.
        """
        return self._blocks.ask(layer, self.queries, self._shape, self._scale).wait()


@dataclass(frozen=True, slots=True)
class KvBuffer:
    """New KV on its way into the pool.

    Attributes:
        reservation: room at the target; None where it has everything.
        first_block: index in the prefix of the first block here.
    """

    memory: HostMemory
    reservation: Reservation | None
    num_blocks: int

    @property
    def first_block(self) -> int:
        """See above."""
        return 0 if self.reservation is None else self.reservation.num_cached_blocks

    @property
    def blocks(self) -> memoryview:
        """To be written before `put`: the missing blocks, in the order of the layout."""
        return self.memory.write_view(0, self.num_blocks)
