"""Converts messages to core types and back. Only this package uses both.

A message that has no valid value raises `ProtocolError`.
Tests: tests/unit/rpc/test_convert.py.
"""

from __future__ import annotations

import math

from kvmesh.core.errors import ProtocolError
from kvmesh.core.kv_formats import OWN_ENGINE, OWN_ORDER
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import (
    BLOCK_HASH_BYTES,
    BlockHash,
    Endpoint,
    FinishReason,
    HostRoute,
    KvLayout,
    Placement,
    Refusal,
    RefusalReason,
    Reservation,
    SequenceSpec,
    Usage,
    WorkerId,
)
from kvmesh.rpc.convert_sampling import fill_sampling_params, sampling_params_from_proto
from kvmesh.v1 import (
    inference_service_pb2,
    kv_manager_service_pb2,
    kv_pool_service_pb2,
    scheduler_service_pb2,
    types_pb2,
)

_REFUSALS: dict[RefusalReason, types_pb2.RefusalReason.ValueType] = {
    RefusalReason.BUSY: types_pb2.REFUSAL_REASON_BUSY,
    RefusalReason.NO_BLOCKS: types_pb2.REFUSAL_REASON_NO_BLOCKS,
    RefusalReason.NO_SLOTS: types_pb2.REFUSAL_REASON_NO_SLOTS,
    RefusalReason.DRAINING: types_pb2.REFUSAL_REASON_DRAINING,
    RefusalReason.DEADLINE: types_pb2.REFUSAL_REASON_DEADLINE,
    RefusalReason.TOO_LONG: types_pb2.REFUSAL_REASON_TOO_LONG,
    RefusalReason.STALE: types_pb2.REFUSAL_REASON_STALE,
    RefusalReason.NO_WORKERS: types_pb2.REFUSAL_REASON_NO_WORKERS,
    RefusalReason.QUOTA: types_pb2.REFUSAL_REASON_QUOTA,
    RefusalReason.INVALID: types_pb2.REFUSAL_REASON_INVALID,
    RefusalReason.LOST: types_pb2.REFUSAL_REASON_LOST,
}
_REFUSALS_BACK = {number: reason for reason, number in _REFUSALS.items()}

_PLACEMENTS: dict[Placement, types_pb2.PlacementMode.ValueType] = {
    Placement.AUTO: types_pb2.PLACEMENT_MODE_UNSPECIFIED,
    Placement.DISAGGREGATED: types_pb2.PLACEMENT_MODE_DISAGGREGATED,
    Placement.AGGREGATED: types_pb2.PLACEMENT_MODE_AGGREGATED,
}
_PLACEMENTS_BACK = {number: placement for placement, number in _PLACEMENTS.items()}

_FINISH: dict[FinishReason | None, types_pb2.FinishReason.ValueType] = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}
_FINISH_BACK = {number: reason for reason, number in _FINISH.items()}


def finish_reason_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    """None means "not finished"."""
    return _FINISH[reason]


def finish_reason_from_proto(number: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None means "not finished"."""
    if number not in _FINISH_BACK:
        raise ProtocolError("unknown_enum", f"finish reason {number}")
    return _FINISH_BACK[number]


def limit_to_ms(limit_s: float) -> int:
    """Converts a limit on the time per token for a message: 0 means no limit."""
    return 0 if math.isinf(limit_s) else max(round(limit_s * 1000), 1)


def limit_from_ms(limit_ms: int) -> float:
    """Converts a message's limit to seconds; infinite for none."""
    return limit_ms / 1000 if limit_ms else math.inf


def placement_to_proto(placement: Placement) -> types_pb2.PlacementMode.ValueType:
    """AUTO is the unspecified mode."""
    return _PLACEMENTS[placement]


def placement_from_proto(number: types_pb2.PlacementMode.ValueType) -> Placement:
    """The unspecified mode is AUTO."""
    if number not in _PLACEMENTS_BACK:
        raise ProtocolError("unknown_enum", f"placement mode {number}")
    return _PLACEMENTS_BACK[number]


def refusal_to_proto(refusal: Refusal) -> types_pb2.Refusal:
    """Refusal as a message."""
    return types_pb2.Refusal(
        reason=_REFUSALS[refusal.reason],
        message=refusal.message,
        work_done=refusal.work_done,
        retry_after_ms=refusal.retry_after_ms,
    )


def refusal_from_proto(message: types_pb2.Refusal) -> Refusal:
    """Refusal from a message. An unknown reason, of a newer peer, becomes LOST."""
    return Refusal(
        reason=_REFUSALS_BACK.get(message.reason, RefusalReason.LOST),
        message=message.message,
        work_done=message.work_done,
        retry_after_ms=message.retry_after_ms,
    )


def endpoint_to_proto(endpoint: Endpoint) -> types_pb2.Endpoint:
    """Endpoint as a message."""
    return types_pb2.Endpoint(host=endpoint.host, port=endpoint.port)


def endpoint_from_proto(message: types_pb2.Endpoint) -> Endpoint:
    """Endpoint from a message."""
    return Endpoint(message.host, message.port)


def sequence_spec_to_proto(spec: SequenceSpec) -> types_pb2.SequenceSpec:
    """SequenceSpec as a message."""
    message = types_pb2.SequenceSpec()
    fill_sequence_spec(message, spec)
    return message


def fill_sequence_spec(message: types_pb2.SequenceSpec, spec: SequenceSpec) -> None:
    """Writes a SequenceSpec into an empty message, which may be part of another message.

    This avoids a copy: assigning a message copies it through its bytes, which costs as much as
    sending.
    """
    message.token_ids.extend(spec.token_ids)
    message.num_prompt_tokens = spec.num_prompt_tokens
    fill_sampling_params(message.sampling, spec.sampling)
    message.root_hash = spec.root_hash
    message.model_fingerprint = spec.fingerprint
    message.adapter = spec.adapter
    if spec.embedding >= 0:
        message.embedding_dimensions = spec.embedding


def sequence_spec_from_proto(message: types_pb2.SequenceSpec) -> SequenceSpec:
    """SequenceSpec from a message.

    Raises:
        ProtocolError: no tokens, a prompt length outside 1..tokens, a hash of another size or a
            bad word without tokens.
    """
    if not 0 < message.num_prompt_tokens <= len(message.token_ids):
        raise ProtocolError(
            "bad_sequence",
            f"{message.num_prompt_tokens} prompt tokens of {len(message.token_ids)} tokens",
        )
    if len(message.root_hash) != BLOCK_HASH_BYTES:
        raise ProtocolError("bad_sequence", f"root hash of {len(message.root_hash)} bytes")
    if not all(word.token_ids for word in message.sampling.bad_words):
        raise ProtocolError("bad_sequence", "a bad word has no tokens")
    return SequenceSpec(
        token_ids=tuple(message.token_ids[:]),  # a slice is a list, and faster than the iterator
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_params_from_proto(message.sampling),
        root_hash=BlockHash(message.root_hash),
        fingerprint=message.model_fingerprint,
        adapter=message.adapter,
        embedding=message.embedding_dimensions if message.HasField("embedding_dimensions") else -1,
    )


def kv_layout_to_proto(layout: KvLayout) -> types_pb2.KvLayout:
    """KvLayout as a message."""
    return types_pb2.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        engine=layout.engine,
        order=layout.order,
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
    )


def kv_layout_from_proto(message: types_pb2.KvLayout) -> KvLayout:
    """KvLayout from a message."""
    return KvLayout(
        model_fingerprint=message.model_fingerprint,
        dtype=message.dtype,
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        engine=message.engine or OWN_ENGINE,
        order=message.order or OWN_ORDER,
        tp_rank=message.tp_rank,
        tp_size=message.tp_size or 1,
    )


def host_route_to_proto(route: HostRoute | None) -> types_pb2.HostRoute | None:
    """The route within a host, as a message."""
    if route is None:
        return None
    return types_pb2.HostRoute(host_id=route.host_id, socket_path=route.socket_path)


def host_route_from_proto(
    message: types_pb2.Reservation
    | kv_pool_service_pb2.ReadLease
    | scheduler_service_pb2.WorkerPeer
    | scheduler_service_pb2.PeerReport,
) -> HostRoute | None:
    """The route within the host of the blocks or of the worker; None if there is none."""
    if not message.HasField("host_route"):
        return None
    return HostRoute(message.host_route.host_id, message.host_route.socket_path)


def reservation_to_proto(reservation: Reservation) -> types_pb2.Reservation:
    """Reservation as a message."""
    return types_pb2.Reservation(
        reservation_id=reservation.reservation_id,
        worker_id=reservation.worker_id,
        incarnation=reservation.incarnation,
        generation=reservation.generation,
        capability=reservation.capability,
        data_endpoint=endpoint_to_proto(reservation.data_endpoint),
        num_cached_blocks=reservation.num_cached_blocks,
        num_blocks=reservation.num_blocks,
        lease_ms=reservation.lease_ms,
        host_route=host_route_to_proto(reservation.host_route),
        run_lengths=reservation.run_lengths,
    )


def reservation_from_proto(message: types_pb2.Reservation) -> Reservation:
    """Reservation from a message."""
    return Reservation(
        reservation_id=message.reservation_id,
        worker_id=WorkerId(message.worker_id),
        incarnation=message.incarnation,
        generation=message.generation,
        capability=message.capability,
        data_endpoint=endpoint_from_proto(message.data_endpoint),
        num_cached_blocks=message.num_cached_blocks,
        num_blocks=message.num_blocks,
        lease_ms=message.lease_ms,
        host_route=host_route_from_proto(message),
        run_lengths=tuple(message.run_lengths),
    )


def prefix_match_to_proto(match: PrefixMatch) -> kv_manager_service_pb2.PrefixMatch:
    """PrefixMatch as a message."""
    return kv_manager_service_pb2.PrefixMatch(
        worker_id=match.worker_id,
        cluster=match.cluster,
        num_blocks=match.num_blocks,
        incarnation=match.incarnation,
        host_blocks=match.host_blocks,
        disk_blocks=match.disk_blocks,
    )


def prefix_match_from_proto(message: kv_manager_service_pb2.PrefixMatch) -> PrefixMatch:
    """PrefixMatch from a message."""
    return PrefixMatch(
        WorkerId(message.worker_id),
        message.incarnation,
        message.cluster,
        message.num_blocks,
        message.host_blocks,
        message.disk_blocks,
    )


def usage_to_proto(usage: Usage) -> inference_service_pb2.Usage:
    """Usage as a message."""
    return inference_service_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def usage_from_proto(message: inference_service_pb2.Usage) -> Usage:
    """Usage from a message."""
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.reasoning_tokens,
    )
