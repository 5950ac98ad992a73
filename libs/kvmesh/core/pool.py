"""Messages between workers and the kvmanager about the pool that the workers' caches form.

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
        endpoint: address at which other workers lease its blocks.
        block_bytes: bytes of one block, all layers.
        room_blocks: number of empty blocks, and of cached ones not read for a while.
        read_blocks_total: number of cached blocks that requests used here instead of computing
            them, and that other workers read.
        leaving: whether it gets no new requests and will leave; blocks that it alone holds should
            be copied elsewhere.
        scenario: scenario of its group; copies stay inside a group.
    """

    role: Role
    endpoint: Endpoint
    block_bytes: int
    room_blocks: int
    read_blocks_total: int
    leaving: bool = False
    scenario: str = ""


@dataclass(frozen=True, slots=True)
class OldBlocks:
    """The blocks that a worker's tier would evict next.

    Attributes:
        tier: `pool`, or the name of a tier below it.
        hashes: in the order of eviction.
    """

    tier: str
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A worker with its last report, as the planner sees it.

    Attributes:
        namespace: namespace of its block hashes; blocks of different namespaces never match.
        read_blocks: recent reads of cached blocks; faded like the heat of segments.
        oldest: the next evictions of its full tiers, if they were requested.
    """

    worker_id: WorkerId
    incarnation: int
    cluster: str
    namespace: str
    report: PoolReport
    read_blocks: float
    oldest: tuple[OldBlocks, ...] = ()


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """An order to a worker to copy a prefix into its own cache.

    Attributes:
        source: the worker that holds all of it.
        source_incarnation: incarnation of that worker.
        endpoint: address at which `source` leases blocks.
        hashes: block hashes of the whole prefix, from its first block.
    """

    order_id: str
    source: WorkerId
    source_incarnation: int
    endpoint: Endpoint
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class EvictionHint:
    """Blocks that a worker evicts first: no request reads them, and other workers hold them too.

    Attributes:
        hashes: in the order of their prefix; the last one is evicted first.
    """

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class OldestOrder:
    """An order to report the blocks that each full tier would evict next, up to a maximum."""

    num_blocks: int


PoolOrder = CopyOrder | EvictionHint | OldestOrder


class CopyOutcome(enum.Enum):
    """Outcome of a copy order, as a metric's label."""

    DONE = "done"
    REFUSED = "refused"
    """The worker did not start the copy."""
    FAILED = "failed"
    """The worker started, and has fewer blocks than ordered."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """A worker's answer to a copy order.

    Attributes:
        reason: one word from a fixed set, for metrics and logs.
        num_blocks: number of blocks that the order added to the worker.
        num_bytes: number of transferred bytes.
    """

    order_id: str
    outcome: CopyOutcome
    reason: str
    num_blocks: int = 0
    num_bytes: int = 0


PoolAnswer = CopyResult | tuple[OldBlocks, ...]
"""A worker's answer to an order: the result of a copy, or the next evictions of full tiers."""
