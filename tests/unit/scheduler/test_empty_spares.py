from __future__ import annotations

import prometheus_client

from kvmesh.core.empty_spare import Assignment, EmptySpare
from kvmesh.core.types import Role, WorkerId
from kvmesh.rpc.convert_empty import empty_spare_to_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest
from services.scheduler.config import FleetConfig
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.registrations import Orders, Registrations, WorkerStream
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.parts import Parts

SPARE = EmptySpare(WorkerId("e"), 1, "south", "kvmesh")
LIKE = Assignment.like(worker_info("d", Role.DECODE), "why")


def waiting() -> float | None:
    return prometheus_client.REGISTRY.get_sample_value(
        "kvmesh_scheduler_empty_spares", {"cluster": "south"}
    )


async def test_it_is_assigned_once_and_gone_with_its_connection() -> None:
    parts = Parts()
    changes: list[int] = []
    empties = EmptySpares(lambda: changes.append(1))
    registrations = Registrations(
        parts.fleet, FleetFeed(parts.fleet), FleetConfig(), parts.clock, empties
    )
    orders: Orders = Outbox()
    stream = WorkerStream(orders)
    registrations.hear(RegisterWorkerRequest(empty=empty_spare_to_proto(SPARE)), stream)
    assert empties.all() == (SPARE,)
    assert waiting() == 1
    assert not len(parts.fleet), "no group, no routes"

    assert empties.assign(WorkerId("e"), LIKE)
    assert (await anext(aiter(orders))).assignment.model == "m"
    assert not empties.assign(WorkerId("e"), LIKE), "it loads already"
    assert not empties.assign(WorkerId("nobody"), LIKE)
    found = empties.find(WorkerId("e"))
    assert found is not None
    assert found.assignment == LIKE
    assert waiting() == 0

    registrations.end(stream)
    assert empties.all() == ()
    assert len(changes) == 3


def test_an_older_connection_does_not_end_a_newer_one() -> None:
    empties, older, newer = EmptySpares(), Orders(), Orders()
    empties.note(SPARE, older)
    empties.note(SPARE, newer)
    empties.forget(older)
    assert empties.all() == (SPARE,)
