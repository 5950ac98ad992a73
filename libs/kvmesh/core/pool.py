"""What workers and the kvmanager tell each other about the pool that the workers' caches form.

Tests: tests/unit/rpc/test_convert_pool.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.core.types import BlockHash, Endpoint, Role, WorkerId


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A worker as a member of the pool.

    Attributes:
        endpoint: where others lease blocks of it.
        block_bytes: of one block, all layers.
        room_blocks: empty blocks, and cached ones that nobody has read for a while.
        read_blocks_total: cached blocks that requests used here instead of computing them, and that
            other workers read.
        leaving: it gets no new requests and will be gone; what it alone holds should go elsewhere.
    """

    role: Role
    endpoint: Endpoint
    block_bytes: int
    room_blocks: int
    read_blocks_total: int
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A worker with its last report, as the planner sees it.

    Attributes:
        namespace: blocks of different namespaces never match.
        read_blocks: cached blocks that it read of late; faded like the heat of segments.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    namespace: str
    report: PoolReport
    read_blocks: float


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """An order to bring a prefix into a worker's own cache.

    Attributes:
        source: who holds all of it, and which life of it.
        endpoint: where `source` leases blocks.
        hashes: of the whole prefix, from its first block.
    """

    order_id: str
    source: WorkerId
    source_incarnation: int
    endpoint: Endpoint
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class EvictionHint:
    """Blocks that leave a worker first when it needs room: others hold them too, nobody reads them.

    Attributes:
        hashes: in the order of their prefix; the last one leaves first.
    """

    hashes: tuple[BlockHash, ...]


PoolOrder = CopyOrder | EvictionHint


class CopyOutcome(enum.Enum):
    """What became of a copy order, as a metric's label."""

    DONE = "done"
    REFUSED = "refused"
    """The worker did not begin."""
    FAILED = "failed"
    """It began, and has less than was asked for."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A worker's answer to a copy order.

    Attributes:
        reason: one word of a closed set, for metrics and logs.
        num_blocks: that the worker has now because of the order.
        num_bytes: that travelled.
    """

    order_id: str
    outcome: CopyOutcome
    reason: str
    num_blocks: int = 0
    num_bytes: int = 0
