"""The holder's side of queries: attention over blocks of this worker for others (TokenLake §4.2).

The giver of a claim checks it: reservations for the blocks that they found cached, read leases for
their blocks. The blocks are held while the answer is computed.
Tests: tests/integration/test_prefix_queries.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.core.types import KvLayout, Refusal, RefusalReason
from kvmesh.engine.protocol import PartialAttention
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.runtime.query_metrics import QueryMetrics
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.attend import ATTEND, AttendArguments, ClaimKind, decode_attend
from kvmesh.transfer.frames import QueryFrame
from kvmesh.transfer.query_ops import QueryGrant

log = event_logger(__name__)

_RETRY_MS = 500


class GivesBlocks(Protocol):
    """Returns the blocks of a claim."""

    def claimed_blocks(self, claim: WriteClaim) -> Sequence[int] | Refusal:
        """The blocks of a claim, in the order of its indexes, if the claim is valid now."""
        ...


@dataclass(frozen=True, slots=True)
class _Work:
    arguments: AttendArguments
    blocks: Sequence[int]


class QueryAnswers:
    """Answers ATTEND (`transfer.query_ops.QueryOps`).

    Args:
        partial: computes the attention.
        givers: check claims, one for each kind.
        max_open: maximum number of queries that are computed or wait. A further query is refused,
            and its sender fetches or computes the prefix.
    """

    def __init__(
        self,
        layout: KvLayout,
        pool: BlockPool,
        partial: PartialAttention,
        givers: Mapping[ClaimKind, GivesBlocks],
        metrics: QueryMetrics,
        max_open: int = 8,
    ) -> None:
        self._max_open = max_open
        self.num_open = 0
        """Number of queries whose blocks are held."""
        self._layout = layout
        self._pool = pool
        self._partial = partial
        self._givers = givers
        self._metrics = metrics

    @property
    def ops(self) -> frozenset[int]:
        """See `QueryOps.ops`."""
        return frozenset({ATTEND})

    def begin(self, query: QueryFrame) -> QueryGrant | Refusal:
        """See `QueryOps.begin`."""
        outcome = self._begin(query)
        if isinstance(outcome, Refusal):
            self._metrics.answers.labels("refused", outcome.reason.value).inc()
        else:
            self.num_open += 1
        return outcome

    def _begin(self, query: QueryFrame) -> QueryGrant | Refusal:
        arguments = decode_attend(query.arguments, query.operand_bytes, self._layout)
        if isinstance(arguments, Refusal):
            return arguments
        if arguments.num_heads != self._partial.num_heads:
            text = f"heads: {arguments.num_heads}, the model has {self._partial.num_heads}"
            return Refusal(RefusalReason.INVALID, text)
        if self.num_open >= self._max_open:
            # Before any block is held or memory is allocated; it reveals nothing about claims.
            text = f"{self.num_open} questions are open"
            return Refusal(RefusalReason.BUSY, text, retry_after_ms=_RETRY_MS)
        claimed = self._givers[arguments.kind].claimed_blocks(arguments.claim)
        if isinstance(claimed, Refusal):
            return claimed
        end = arguments.first + arguments.count
        if end > len(claimed):
            text = f"blocks: {arguments.first}+{arguments.count} of {len(claimed)}"
            return Refusal(RefusalReason.INVALID, text)
        blocks = claimed[arguments.first : end]
        self._pool.acquire(blocks)
        return QueryGrant(query, arguments.answer_bytes, _Work(arguments, blocks))

    def compute(self, grant: QueryGrant, operands: memoryview) -> Sequence[memoryview] | Refusal:
        """See `QueryOps.compute`."""
        work: _Work = grant.work
        arguments = work.arguments
        try:
            answer = self._partial.attend(arguments.layer, work.blocks, operands, arguments.scale)
        except (RuntimeError, MemoryError) as error:  # the errors of a device without memory
            log.warning("query_failed", error=str(error))
            self._metrics.answers.labels("failed", "").inc()
            return Refusal(RefusalReason.LOST, "attention could not be computed")
        self._metrics.answers.labels("answered", "").inc()
        return answer

    def end(self, grant: QueryGrant) -> None:
        """See `QueryOps.end`."""
        work: _Work = grant.work
        self.num_open -= 1
        self._pool.release(work.blocks)
        if work.arguments.layer == 0:  # the other layers read the same blocks
            self._metrics.read_blocks_total += len(work.blocks)
