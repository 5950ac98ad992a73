"""Converts empty spares to messages and back.

Tests: tests/unit/rpc/test_convert_empty.py.
"""

from __future__ import annotations

from kvmesh.core.empty_spare import EmptySpare
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import WorkerId
from kvmesh.rpc.convert_worker import assignment_from_proto, assignment_to_proto
from kvmesh.v1 import scheduler_service_pb2 as pb


def empty_spare_to_proto(spare: EmptySpare) -> pb.EmptyWorker:
    """EmptySpare as a message."""
    assignment = spare.assignment
    return pb.EmptyWorker(
        worker_id=spare.worker_id,
        incarnation=spare.incarnation,
        cluster=spare.cluster,
        engine=spare.engine,
        assignment=None if assignment is None else assignment_to_proto(assignment),
    )


def empty_spare_from_proto(message: pb.EmptyWorker) -> EmptySpare:
    """EmptySpare from a message.

    Raises:
        ProtocolError: an empty worker id, or an assignment that cannot be read.
    """
    if not message.worker_id:
        raise ProtocolError("bad_worker", "an empty worker without a name")
    told = message.HasField("assignment")
    return EmptySpare(
        WorkerId(message.worker_id),
        message.incarnation,
        message.cluster,
        message.engine,
        assignment_from_proto(message.assignment) if told else None,
    )
