from __future__ import annotations

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import WorkerLoad
from kvmesh.rpc.convert_worker import fleet_worker_to_proto
from kvmesh.rpc.fleet_view import FleetMirror
from kvmesh.v1.scheduler_service_pb2 import WatchFleetResponse
from tests.unit.policy.fleet_examples import worker_info

P, Q = (FleetWorker(worker_info(name), WorkerLoad()) for name in "pq")
BUSY = FleetWorker(P.info, WorkerLoad(prefill_active=2))


def whole(version: int, *workers: FleetWorker) -> WatchFleetResponse:
    return WatchFleetResponse(version=version, workers=map(fleet_worker_to_proto, workers))


def test_changes_of_a_whole_view() -> None:
    mirror = FleetMirror()
    mirror.take(whole(3, P, Q))
    assert list(mirror.workers) == [P, Q]
    load = fleet_worker_to_proto(BUSY, with_info=False)
    assert not load.HasField("info")
    mirror.take(WatchFleetResponse(version=5, base_version=3, workers=[load], gone=["q"]))
    assert list(mirror.workers) == [BUSY]
    mirror.take(whole(6, Q))
    assert list(mirror.workers) == [Q], "a whole view stands for itself"


@pytest.mark.parametrize("base", [2, 4])
def test_changes_of_another_version_are_not_guessed(base: int) -> None:
    mirror = FleetMirror()
    mirror.take(whole(3, P))
    with pytest.raises(ProtocolError, match="changes of version"):
        mirror.take(WatchFleetResponse(version=5, base_version=base, gone=["p"]))


def test_a_load_of_a_stranger_is_an_error() -> None:
    mirror = FleetMirror()
    mirror.take(whole(3, P))
    load = fleet_worker_to_proto(Q, with_info=False)
    with pytest.raises(ProtocolError, match="unknown worker 'q'"):
        mirror.take(WatchFleetResponse(version=4, base_version=3, workers=[load]))
