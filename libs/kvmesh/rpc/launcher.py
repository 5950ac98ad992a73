"""A client for the launcher of another process, and a server for the launcher of this process.

Tests: tests/integration/test_launcher_service.py.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import grpc

from kvmesh.core.launch import Launched, Launcher, LaunchError, LaunchSpec
from kvmesh.core.types import WorkerId
from kvmesh.rpc.channels import MeshAccess, open_channel
from kvmesh.rpc.convert_worker import role_from_proto, role_to_proto
from kvmesh.v1 import launcher_service_pb2 as pb
from kvmesh.v1.launcher_service_pb2_grpc import LauncherServiceServicer, LauncherServiceStub

AnswerT = TypeVar("AnswerT")

ANSWER_S = 5.0
STOP_S = 120.0
"""Seconds to wait for a worker to end, which may first finish its running work."""


class RemoteLauncher:
    """A `Launcher` that calls the process at `target`."""

    def __init__(self, target: str, access: MeshAccess) -> None:
        self._target = target
        self._channel = open_channel(target, access)
        self._stub = LauncherServiceStub(self._channel)

    async def start(self, spec: LaunchSpec) -> WorkerId:
        """See `Launcher.start`."""
        request = pb.StartWorkerRequest(spec=_spec_to_proto(spec))
        answer = await self._ask(self._stub.StartWorker(request, timeout=ANSWER_S))
        return WorkerId(answer.worker_id)

    async def stop(self, worker_id: WorkerId) -> None:
        """See `Launcher.stop`."""
        request = pb.StopWorkerRequest(worker_id=worker_id)
        await self._ask(self._stub.StopWorker(request, timeout=STOP_S))

    async def restart(self, worker_id: WorkerId) -> WorkerId:
        """See `Launcher.restart`."""
        request = pb.RestartWorkerRequest(worker_id=worker_id)
        answer = await self._ask(self._stub.RestartWorker(request, timeout=ANSWER_S))
        return WorkerId(answer.worker_id) if answer.worker_id else worker_id

    async def list(self) -> list[Launched]:
        """See `Launcher.list`."""
        answer = await self._ask(self._stub.ListWorkers(pb.ListWorkersRequest(), timeout=ANSWER_S))
        return [
            Launched(WorkerId(each.worker_id), _spec_from_proto(each.spec))
            for each in answer.workers
        ]

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def _ask(self, call: Awaitable[AnswerT]) -> AnswerT:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise LaunchError(f"the launcher at {self._target}: {error.details()}") from error


class LauncherServicer(LauncherServiceServicer):
    """Serves the launcher of this process."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    async def StartWorker(
        self,
        request: pb.StartWorkerRequest,
        context: grpc.aio.ServicerContext[pb.StartWorkerRequest, pb.StartWorkerResponse],
    ) -> pb.StartWorkerResponse:
        """See launcher_service.proto."""
        try:
            name = await self._launcher.start(_spec_from_proto(request.spec))
        except LaunchError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.StartWorkerResponse(worker_id=name)

    async def StopWorker(
        self,
        request: pb.StopWorkerRequest,
        context: grpc.aio.ServicerContext[pb.StopWorkerRequest, pb.StopWorkerResponse],
    ) -> pb.StopWorkerResponse:
        """See launcher_service.proto."""
        try:
            await self._launcher.stop(WorkerId(request.worker_id))
        except LaunchError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return pb.StopWorkerResponse()

    async def RestartWorker(
        self,
        request: pb.RestartWorkerRequest,
        context: grpc.aio.ServicerContext[pb.RestartWorkerRequest, pb.RestartWorkerResponse],
    ) -> pb.RestartWorkerResponse:
        """See launcher_service.proto."""
        try:
            name = await self._launcher.restart(WorkerId(request.worker_id))
        except LaunchError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        return pb.RestartWorkerResponse(worker_id=name)

    async def ListWorkers(
        self,
        request: pb.ListWorkersRequest,
        context: grpc.aio.ServicerContext[pb.ListWorkersRequest, pb.ListWorkersResponse],
    ) -> pb.ListWorkersResponse:
        """See launcher_service.proto."""
        try:
            kept = await self._launcher.list()
        except LaunchError as error:  # the API server of a cluster may be away
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        workers = (
            pb.LaunchedWorker(worker_id=each.worker_id, spec=_spec_to_proto(each.spec))
            for each in kept
        )
        return pb.ListWorkersResponse(workers=workers)


def _spec_to_proto(spec: LaunchSpec) -> pb.WorkerSpec:
    role = role_to_proto(spec.role)
    return pb.WorkerSpec(
        role=role, scenario=spec.scenario, checkpoint=spec.checkpoint, model=spec.model
    )


def _spec_from_proto(message: pb.WorkerSpec) -> LaunchSpec:
    role = role_from_proto(message.role)
    if role is None:
        raise LaunchError("a worker needs a role: prefill, decode, hybrid or spare")
    return LaunchSpec(role, message.scenario, message.checkpoint, message.model)
