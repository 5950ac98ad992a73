"""Converts the pool's messages to internal values and back.

Tests: tests/unit/rpc/test_convert_pool.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvmesh.core.errors import ProtocolError
from kvmesh.core.pool import (
    CopyOrder,
    CopyOutcome,
    CopyResult,
    EvictionHint,
    OldBlocks,
    OldestOrder,
    PoolMember,
    PoolOrder,
    PoolReport,
)
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash, WorkerId
from kvmesh.kv.hashing import split_hashes
from kvmesh.policy.heat import CooledPrefix, SegmentHeat
from kvmesh.rpc.convert import endpoint_from_proto, endpoint_to_proto
from kvmesh.rpc.convert_worker import role_from_proto, role_to_proto
from kvmesh.v1 import pool_types_pb2 as pb

_OUTCOMES = {
    CopyOutcome.DONE: pb.COPY_OUTCOME_DONE,
    CopyOutcome.REFUSED: pb.COPY_OUTCOME_REFUSED,
    CopyOutcome.FAILED: pb.COPY_OUTCOME_FAILED,
}
_OUTCOMES_BACK = {value: outcome for outcome, value in _OUTCOMES.items()}


def pool_report_to_proto(report: PoolReport) -> pb.PoolReport:
    """PoolReport as a message."""
    return pb.PoolReport(
        role=role_to_proto(report.role),
        endpoint=endpoint_to_proto(report.endpoint),
        block_bytes=report.block_bytes,
        room_blocks=report.room_blocks,
        read_blocks_total=report.read_blocks_total,
        leaving=report.leaving,
        scenario=report.scenario,
    )


def pool_report_from_proto(message: pb.PoolReport) -> PoolReport:
    """PoolReport from a message.

    Raises:
        ProtocolError: an unknown role.
    """
    role = role_from_proto(message.role)
    if role is None:
        raise ProtocolError("bad_role", f"role {message.role}")
    return PoolReport(
        role,
        endpoint_from_proto(message.endpoint),
        message.block_bytes,
        message.room_blocks,
        message.read_blocks_total,
        message.leaving,
        message.scenario,
    )


def pool_order_to_proto(order: PoolOrder) -> pb.PoolOrder:
    """PoolOrder as a message."""
    if isinstance(order, OldestOrder):
        return pb.PoolOrder(tell_oldest=pb.OldestOrder(num_blocks=order.num_blocks))
    hashes = b"".join(order.hashes)
    if isinstance(order, EvictionHint):
        return pb.PoolOrder(evict_first=pb.EvictionHint(block_hashes=hashes))
    return pb.PoolOrder(
        copy=pb.CopyOrder(
            order_id=order.order_id,
            source_worker_id=order.source,
            source_incarnation=order.source_incarnation,
            source=endpoint_to_proto(order.endpoint),
            block_hashes=hashes,
        )
    )


def pool_order_from_proto(message: pb.PoolOrder) -> PoolOrder | None:
    """PoolOrder from a message; None if its kind is not known here.

    Raises:
        ProtocolError: a hash is incomplete.
    """
    match message.WhichOneof("order"):
        case "copy":
            copy = message.copy
            return CopyOrder(
                copy.order_id,
                WorkerId(copy.source_worker_id),
                copy.source_incarnation,
                endpoint_from_proto(copy.source),
                tuple(split_hashes(copy.block_hashes)),
            )
        case "evict_first":
            return EvictionHint(tuple(split_hashes(message.evict_first.block_hashes)))
        case "tell_oldest":
            return OldestOrder(message.tell_oldest.num_blocks)
        case _:
            return None


def copy_result_to_proto(result: CopyResult) -> pb.CopyResult:
    """CopyResult as a message."""
    return pb.CopyResult(
        order_id=result.order_id,
        outcome=_OUTCOMES[result.outcome],
        reason=result.reason,
        num_blocks=result.num_blocks,
        num_bytes=result.num_bytes,
    )


def copy_result_from_proto(message: pb.CopyResult) -> CopyResult:
    """CopyResult from a message.

    Raises:
        ProtocolError: an unknown outcome.
    """
    outcome = _OUTCOMES_BACK.get(message.outcome)
    if outcome is None:
        raise ProtocolError("bad_outcome", f"outcome {message.outcome}")
    return CopyResult(
        message.order_id, outcome, message.reason, message.num_blocks, message.num_bytes
    )


def oldest_to_proto(oldest: Iterable[OldBlocks]) -> list[pb.OldBlocks]:
    """Converts a worker's next evictions to messages."""
    return [pb.OldBlocks(tier=old.tier, block_hashes=b"".join(old.hashes)) for old in oldest]


def oldest_from_proto(messages: Iterable[pb.OldBlocks]) -> tuple[OldBlocks, ...]:
    """Parses a worker's next evictions.

    Raises:
        ProtocolError: a hash is incomplete.
    """
    return tuple(OldBlocks(old.tier, tuple(split_hashes(old.block_hashes))) for old in messages)


def knowledge_to_proto(
    heat: Mapping[str, Sequence[SegmentHeat]],
    cooled: Mapping[str, Sequence[CooledPrefix]],
    members: Iterable[PoolMember],
) -> pb.PoolKnowledge:
    """A kvmanager's knowledge of reads, as a message.

    Args:
        heat: by namespace, as `HeatTable.hottest` returns it.
        cooled: of the same namespaces, as `HeatTable.cooled` returns it.
    """
    return pb.PoolKnowledge(
        heat=[
            pb.NamespaceReads(
                namespace=namespace,
                segments=[
                    pb.SegmentReads(
                        blocks=each.blocks,
                        parent=each.parent or b"",
                        depth=each.depth,
                        reads=each.reads,
                    )
                    for each in segments
                ],
                cooled=[
                    pb.CooledPrefix(prefix=each.prefix, own_blocks=each.own_blocks)
                    for each in cooled[namespace]
                ],
            )
            for namespace, segments in heat.items()
        ],
        members=[
            pb.PoolMember(
                worker_id=member.worker_id,
                incarnation=member.incarnation,
                cluster=member.cluster,
                namespace=member.namespace,
                report=pool_report_to_proto(member.report),
                read_blocks=member.read_blocks,
                oldest=oldest_to_proto(member.oldest),
            )
            for member in members
        ],
    )


def _some_hashes(joined: bytes) -> bytes:
    if not joined or len(joined) % BLOCK_HASH_BYTES:
        raise ProtocolError("hash_length", f"{len(joined)} bytes are no block hashes")
    return joined


def heat_from_proto(message: pb.NamespaceReads) -> list[SegmentHeat]:
    """The segments of a namespace from a message, in its order: parents before children.

    Raises:
        ProtocolError: a segment without blocks, or with an incomplete hash.
    """
    return [
        SegmentHeat(
            BlockHash(_some_hashes(each.blocks)[-BLOCK_HASH_BYTES:]),
            BlockHash(each.parent) if each.parent else None,
            each.blocks,
            each.depth,
            each.reads,
        )
        for each in message.segments
    ]


def cooled_from_proto(message: pb.NamespaceReads) -> list[CooledPrefix]:
    """The cooled prefixes of a namespace from a message.

    Raises:
        ProtocolError: a prefix without blocks, or with an incomplete hash.
    """
    return [CooledPrefix(_some_hashes(each.prefix), each.own_blocks) for each in message.cooled]


def pool_member_from_proto(message: pb.PoolMember) -> PoolMember:
    """PoolMember from a message.

    Raises:
        ProtocolError: an unknown role, or an incomplete hash.
    """
    return PoolMember(
        WorkerId(message.worker_id),
        message.incarnation,
        message.cluster,
        message.namespace,
        pool_report_from_proto(message.report),
        message.read_blocks,
        oldest_from_proto(message.oldest),
    )
