from __future__ import annotations

import pytest

from kvmesh.core.details import LinkDetail, ModelDetail, QueueLengths, WorkerDetail
from kvmesh.core.types import WorkerId
from kvmesh.rpc.convert_detail import (
    model_detail_from_proto,
    model_detail_to_proto,
    worker_detail_from_proto,
    worker_detail_to_proto,
    worker_order,
)
from kvmesh.v1 import scheduler_service_pb2 as pb
from kvmesh.v1 import types_pb2

LINK = LinkDetail(
    peer=WorkerId("d0"),
    channel="tcp",
    bytes_total=7,
    queued_bytes=2,
    busy_s=0.5,
    budget_bytes_s=1e9,
    rtt_s=0.001,
    retransmits=3,
    failed_total=1,
    pair_s=1e-9,
)


LINKS = (LINK, LinkDetail(LINK.peer, "shm"))
QUEUES = (QueueLengths(1, 2, 3, 4, 5), QueueLengths(6, 7, 8, 9, 10))


@pytest.mark.parametrize("detail", [WorkerDetail(), WorkerDetail(True, 3, 100, 40, LINKS, *QUEUES)])
def test_details_survive_the_wire(detail: WorkerDetail) -> None:
    sent = worker_detail_to_proto(detail).SerializeToString()
    assert worker_detail_from_proto(pb.WorkerDetail.FromString(sent)) == detail


@pytest.mark.parametrize(
    "detail", [ModelDetail("m"), ModelDetail("m", "far", 0.0), ModelDetail("m", "far", 512.5)]
)
def test_model_details_survive_the_wire(detail: ModelDetail) -> None:
    sent = model_detail_to_proto(detail).SerializeToString()
    assert model_detail_from_proto(pb.ModelDetail.FromString(sent)) == detail


def test_orders_are_passed_on_as_they_are() -> None:
    cordon = pb.WorkerCordon(cordoned=True, reason="disk")
    assert worker_order(pb.OrderWorkerRequest(cordon=cordon)) == pb.RegisterWorkerResponse(
        cordon=cordon
    )
    role = pb.WorkerRole(role=types_pb2.ROLE_HYBRID)
    assert worker_order(pb.OrderWorkerRequest(role=role)) == pb.RegisterWorkerResponse(role=role)


@pytest.mark.parametrize(
    "request_", [pb.OrderWorkerRequest(), pb.OrderWorkerRequest(role=pb.WorkerRole())]
)
def test_orders_without_content_are_none(request_: pb.OrderWorkerRequest) -> None:
    assert worker_order(request_) is None
