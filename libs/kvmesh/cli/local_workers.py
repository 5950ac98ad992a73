"""The launcher of `kvmesh up`: new workers are processes of the stack, kept like its initial ones.

Tests: tests/unit/cli/test_local_workers.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from typing import Protocol

import grpc

from kvmesh.cli.stack import MakeWorker, Member, StackPlan
from kvmesh.core.launch import Launched, LaunchError, LaunchSpec
from kvmesh.core.mesh_secret import load_secret
from kvmesh.core.types import WorkerId


class Processes(Protocol):
    """Keeper of a stack's processes; `StackRunner` implements it."""

    @property
    def members(self) -> Mapping[str, Member]:
        """All processes, by name."""
        ...

    @property
    def names(self) -> Set[str]:
        """Names in use: of the members, and of processes that are being stopped."""
        ...

    def keep(self, member: Member) -> None:
        """Starts one more process, and keeps it running."""
        ...

    async def let_go(self, name: str) -> None:
        """Stops a process for good."""
        ...

    def kill(self, name: str) -> None:
        """Kills a process; it is restarted."""
        ...


async def serve_workers(plan: StackPlan, processes: Processes) -> grpc.aio.Server | None:
    """Starts the gRPC server at which the scheduler asks for workers; None if the plan has none.

    Raises:
        ConfigError: the port is taken.
    """
    if plan.launcher is None or plan.make_worker is None:
        return None
    # Imported here, because commands that start no stack do not need it.
    from kvmesh.rpc.channels import bind_server, make_server  # noqa: PLC0415
    from kvmesh.rpc.launcher import LauncherServicer  # noqa: PLC0415
    from kvmesh.v1 import launcher_service_pb2_grpc  # noqa: PLC0415

    server = make_server(secret=load_secret(plan.secret_file))
    servicer = LauncherServicer(LocalWorkers(processes, plan.make_worker))
    launcher_service_pb2_grpc.add_LauncherServiceServicer_to_server(servicer, server)
    bind_server(server, plan.launcher.host, plan.launcher.port)
    await server.start()
    return server


class LocalWorkers:
    """A `Launcher` that keeps workers as local processes."""

    def __init__(self, processes: Processes, make_worker: MakeWorker) -> None:
        self._processes = processes
        self._make_worker = make_worker

    async def start(self, spec: LaunchSpec) -> WorkerId:
        """See `Launcher.start`."""
        taken = self._processes.names
        names = (f"{spec.role.value}-{number}" for number in itertools.count())
        name = next(each for each in names if each not in taken)
        self._processes.keep(self._make_worker(name, spec))
        return WorkerId(name)

    async def stop(self, worker_id: WorkerId) -> None:
        """See `Launcher.stop`."""
        self._find(worker_id)
        await self._processes.let_go(worker_id)

    async def restart(self, worker_id: WorkerId) -> WorkerId:
        """See `Launcher.restart`."""
        self._find(worker_id)
        self._processes.kill(worker_id)
        return worker_id

    async def list(self) -> list[Launched]:
        """See `Launcher.list`."""
        members = sorted(self._processes.members.items())
        return [
            Launched(WorkerId(name), member.launch)
            for name, member in members
            if member.launch is not None
        ]

    def _find(self, worker_id: WorkerId) -> None:
        known = [each for each, member in self._processes.members.items() if member.is_worker]
        if worker_id not in known:
            raise LaunchError(f"{worker_id} is no worker of this stack; these are: {known}")
