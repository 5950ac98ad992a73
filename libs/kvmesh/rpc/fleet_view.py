"""A watcher's copy of the fleet: a full view first, then only changes.

Tests: tests/unit/rpc/test_fleet_view.py, tests/unit/scheduler/test_feed.py.
"""

from __future__ import annotations

import dataclasses

from kvmesh.core.details import FleetWorker
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import WorkerId
from kvmesh.rpc.convert_detail import worker_detail_from_proto
from kvmesh.rpc.convert_worker import (
    fleet_worker_from_proto,
    health_from_proto,
    worker_load_from_proto,
)
from kvmesh.v1.scheduler_service_pb2 import WatchFleetResponse


class FleetMirror:
    """The state of the fleet after the messages of one stream."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, FleetWorker] = {}
        self._version = 0

    @property
    def workers(self) -> tuple[FleetWorker, ...]:
        """The fleet after the last message."""
        return tuple(self._workers.values())

    def take(self, message: WatchFleetResponse) -> None:
        """Applies the next message.

        Raises:
            ProtocolError: it changes another version than the present one, or an unknown worker.
                The caller opens a new stream, which begins with a full view.
        """
        if not message.base_version:
            self._workers.clear()
        elif message.base_version != self._version:
            text = f"changes of version {message.base_version}, this is {self._version}"
            raise ProtocolError("bad_fleet", text)
        for name in message.gone:
            self._workers.pop(WorkerId(name), None)
        for each in message.workers:
            if each.HasField("info"):
                worker = fleet_worker_from_proto(each)
                self._workers[worker.info.worker_id] = worker
                continue
            known = self._workers.get(WorkerId(each.worker_id))
            if known is None:
                raise ProtocolError(
                    "bad_fleet", f"an update of the unknown worker {each.worker_id!r}"
                )
            self._workers[known.info.worker_id] = dataclasses.replace(
                known,
                load=worker_load_from_proto(each.load),
                detail=worker_detail_from_proto(each.detail),
                health=health_from_proto(each.health),
                fault=each.fault,
                connecting=each.connecting,
            )
        self._version = message.version
