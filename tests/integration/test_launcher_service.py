"""A launcher that is another process: calls, secrets and errors over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvmesh.cli.local_workers import LocalWorkers
from kvmesh.core.launch import LaunchError, LaunchSpec
from kvmesh.core.mesh_secret import MeshSecret, load_secret, new_secret
from kvmesh.core.types import Role, WorkerId
from kvmesh.rpc.channels import MeshAccess, bind_server, make_server
from kvmesh.rpc.launcher import LauncherServicer, RemoteLauncher
from kvmesh.v1.launcher_service_pb2_grpc import add_LauncherServiceServicer_to_server
from tests.unit.cli.test_local_workers import Stack, member


def a_secret() -> MeshSecret:
    found = load_secret("", new_secret())
    assert found is not None
    return found


@asynccontextmanager
async def launcher(
    stack: Stack, here: MeshSecret, there: MeshSecret
) -> AsyncIterator[RemoteLauncher]:
    server = make_server(secret=there)
    servicer = LauncherServicer(LocalWorkers(stack, member))
    add_LauncherServiceServicer_to_server(servicer, server)
    port = bind_server(server, "127.0.0.1", 0)
    await server.start()
    remote = RemoteLauncher(f"127.0.0.1:{port}", MeshAccess(secret=here))
    try:
        yield remote
    finally:
        await remote.close()
        await server.stop(None)


async def test_all_calls_arrive_whole() -> None:
    stack, secret = Stack(), a_secret()
    async with launcher(stack, secret, secret) as remote:
        spec = LaunchSpec(Role.DECODE, "chat", "/m/two", "other")
        name = await remote.start(spec)
        assert [(each.worker_id, each.spec) for each in await remote.list()] == [(name, spec)]
        assert await remote.restart(name) == name
        assert stack.killed == [name]
        await remote.stop(name)
        assert await remote.list() == []
        with pytest.raises(LaunchError, match="decode-0 is no worker of this stack"):
            await remote.stop(WorkerId("decode-0"))


async def test_callers_without_the_secret_start_nothing() -> None:
    stack = Stack()
    async with launcher(stack, a_secret(), a_secret()) as remote:
        with pytest.raises(LaunchError):
            await remote.start(LaunchSpec(Role.DECODE))
    assert list(stack.members) == ["gateway"]
