"""Converts workers' details and operators' orders to messages and back.

Tests: tests/unit/rpc/test_convert_detail.py.
"""

from __future__ import annotations

from kvmesh.core.details import LinkDetail, ModelDetail, QueueLengths, WorkerDetail
from kvmesh.core.types import WorkerId
from kvmesh.v1 import scheduler_service_pb2 as pb
from kvmesh.v1 import types_pb2


def worker_detail_to_proto(detail: WorkerDetail) -> pb.WorkerDetail:
    """WorkerDetail as a message."""
    return pb.WorkerDetail(
        cordoned=detail.cordoned,
        blocks_cached=detail.blocks_cached,
        prompt_tokens_total=detail.prompt_tokens_total,
        cached_tokens_total=detail.cached_tokens_total,
        links=[_link_to_proto(link) for link in detail.links],
        prefill_queues=_queues_to_proto(detail.prefill_queues),
        decode_queues=_queues_to_proto(detail.decode_queues),
    )


def worker_detail_from_proto(message: pb.WorkerDetail) -> WorkerDetail:
    """WorkerDetail from a message."""
    return WorkerDetail(
        cordoned=message.cordoned,
        blocks_cached=message.blocks_cached,
        prompt_tokens_total=message.prompt_tokens_total,
        cached_tokens_total=message.cached_tokens_total,
        prefill_queues=_queues_from_proto(message.prefill_queues),
        decode_queues=_queues_from_proto(message.decode_queues),
        links=tuple(_link_from_proto(link) for link in message.links),
    )


def model_detail_to_proto(detail: ModelDetail) -> pb.ModelDetail:
    """ModelDetail as a message."""
    return pb.ModelDetail(
        model=detail.model,
        remote_cluster=detail.remote_cluster,
        threshold_tokens=detail.threshold_tokens,
    )


def model_detail_from_proto(message: pb.ModelDetail) -> ModelDetail:
    """ModelDetail from a message."""
    threshold = message.threshold_tokens if message.HasField("threshold_tokens") else None
    return ModelDetail(message.model, message.remote_cluster, threshold)


def _queues_to_proto(lengths: QueueLengths) -> pb.QueueLengths:
    return pb.QueueLengths(
        waiting=lengths.waiting,
        running=lengths.running,
        swapped=lengths.swapped,
        sending=lengths.sending,
        receiving=lengths.receiving,
    )


def _queues_from_proto(message: pb.QueueLengths) -> QueueLengths:
    return QueueLengths(
        message.waiting, message.running, message.swapped, message.sending, message.receiving
    )


def _link_to_proto(link: LinkDetail) -> pb.LinkDetail:
    return pb.LinkDetail(
        peer_worker_id=link.peer,
        channel=link.channel,
        bytes_total=link.bytes_total,
        queued_bytes=link.queued_bytes,
        busy_s=link.busy_s,
        budget_bytes_s=link.budget_bytes_s,
        rtt_s=link.rtt_s,
        retransmits=link.retransmits,
        failed_total=link.failed_total,
        pair_s=link.pair_s,
    )


def _link_from_proto(message: pb.LinkDetail) -> LinkDetail:
    return LinkDetail(
        peer=WorkerId(message.peer_worker_id),
        channel=message.channel,
        bytes_total=message.bytes_total,
        queued_bytes=message.queued_bytes,
        busy_s=message.busy_s,
        budget_bytes_s=message.budget_bytes_s,
        rtt_s=message.rtt_s,
        retransmits=message.retransmits,
        failed_total=message.failed_total,
        pair_s=message.pair_s,
    )


def worker_order(request: pb.OrderWorkerRequest) -> pb.RegisterWorkerResponse | None:
    """The message to a worker for an operator's order; None if the order is invalid."""
    match request.WhichOneof("order"):
        case "drain":
            return pb.RegisterWorkerResponse(drain=request.drain)
        case "cordon":
            return pb.RegisterWorkerResponse(cordon=request.cordon)
        case "role" if request.role.role != types_pb2.ROLE_UNSPECIFIED:
            return pb.RegisterWorkerResponse(role=request.role)
        case _:
            return None
