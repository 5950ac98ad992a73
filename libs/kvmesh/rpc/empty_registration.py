"""An empty spare's connections to the schedulers, until it has a model.

Tests: tests/integration/test_empty_spare.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from kvmesh.core.empty_spare import Assignment, EmptySpare
from kvmesh.rpc.channels import MeshAccess, open_channel
from kvmesh.rpc.convert_empty import empty_spare_to_proto
from kvmesh.rpc.convert_worker import assignment_from_proto
from kvmesh.rpc.registration import RegistrationStream
from kvmesh.rpc.stream import PeerStream
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerRequest, RegisterWorkerResponse
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub


class EmptyRegistration:
    """Shows an empty spare to all schedulers and takes the first assignment.

    Args:
        targets: `host:port` of every scheduler replica.
    """

    def __init__(self, targets: Sequence[str], spare: EmptySpare, access: MeshAccess) -> None:
        self._targets = targets
        self._spare = spare
        self._access = access
        self._streams: list[RegistrationStream] = []
        self._assigned: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Stays connected until cancelled, also while the model is loaded."""
        async with asyncio.TaskGroup() as links:
            for target in self._targets:
                links.create_task(self._link(target))

    async def assignment(self) -> Assignment:
        """Waits for an assignment."""
        return await self._assigned

    async def _link(self, target: str) -> None:
        async with open_channel(target, self._access) as channel:
            stub = SchedulerServiceStub(channel)
            stream: RegistrationStream = PeerStream(
                f"scheduler@{target}",
                stub.RegisterWorker,
                self._on_message,
                on_up=lambda: self._tell(stream),
            )
            self._streams.append(stream)
            await stream.run()

    def _tell(self, stream: RegistrationStream) -> None:
        stream.send(RegisterWorkerRequest(empty=empty_spare_to_proto(self._spare)))

    def _on_message(self, message: RegisterWorkerResponse) -> None:
        if message.WhichOneof("order") != "assignment" or self._assigned.done():
            return
        found = assignment_from_proto(message.assignment)
        self._assigned.set_result(found)
        # All schedulers are told, so that no other one assigns it too.
        self._spare = dataclasses.replace(self._spare, assignment=found)
        for stream in self._streams:
            if stream.connected:
                self._tell(stream)
