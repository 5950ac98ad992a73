from __future__ import annotations

import pytest

from kvmesh.core.empty_spare import Assignment, EmptySpare, Origin
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import Role, WorkerId
from kvmesh.rpc.convert_empty import empty_spare_from_proto, empty_spare_to_proto
from kvmesh.rpc.convert_worker import (
    assignment_from_proto,
    worker_info_from_proto,
    worker_info_to_proto,
)
from kvmesh.v1 import scheduler_service_pb2 as pb
from kvmesh.v1 import types_pb2
from tests.unit.policy.fleet_examples import worker_info

ASSIGNMENT = Assignment(Role.DECODE, "doc", "m", "/m", "float32", 16, 4096, "", "why")


@pytest.mark.parametrize("assignment", [None, ASSIGNMENT])
def test_round_trip_over_the_wire(assignment: Assignment | None) -> None:
    spare = EmptySpare(WorkerId("e"), 7, "east", "fake", assignment)
    sent = empty_spare_to_proto(spare).SerializeToString()
    assert empty_spare_from_proto(pb.EmptyWorker.FromString(sent)) == spare


@pytest.mark.parametrize("assignment", [None, ASSIGNMENT])
def test_a_worker_tells_how_it_came_to_its_model(assignment: Assignment | None) -> None:
    info = worker_info("w", origin=Origin("/m", 3.0, 1.0, assignment))
    sent = worker_info_to_proto(info).SerializeToString()
    assert worker_info_from_proto(types_pb2.WorkerInfo.FromString(sent)) == info


def test_what_makes_no_sense_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="without a name"):
        empty_spare_from_proto(pb.EmptyWorker(engine="fake"))
    with pytest.raises(ProtocolError, match="role 0"):
        assignment_from_proto(types_pb2.WorkerAssignment(block_size=16))
    with pytest.raises(ProtocolError, match="0 a block"):
        assignment_from_proto(types_pb2.WorkerAssignment(role=types_pb2.ROLE_DECODE))
