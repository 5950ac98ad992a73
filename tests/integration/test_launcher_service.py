"""A launcher that is another process: calls, secrets and errors over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvmesh.cli.certs import main as make_certs
from kvmesh.cli.local_workers import LocalWorkers
from kvmesh.core.launch import LaunchError, LaunchSpec
from kvmesh.core.mesh_secret import MeshSecret, load_secret, new_secret
from kvmesh.core.types import Role, WorkerId
from kvmesh.rpc.channels import MeshAccess, PeerTls, bind_server, make_server
from kvmesh.rpc.launcher import LauncherServicer, RemoteLauncher
from kvmesh.v1.launcher_service_pb2_grpc import add_LauncherServiceServicer_to_server
from tests.unit.cli.test_local_workers import Stack, member


def a_secret() -> MeshSecret:
    found = load_secret("", new_secret())
    assert found is not None
    return found


@asynccontextmanager
async def serving(
    stack: Stack, secret: MeshSecret, tls: PeerTls | None = None, *callers: str
) -> AsyncIterator[str]:
    """The address of a launcher."""
    server = make_server(secret=secret, callers=frozenset(callers))
    servicer = LauncherServicer(LocalWorkers(stack, member))
    add_LauncherServiceServicer_to_server(servicer, server)
    port = bind_server(server, "127.0.0.1", 0, tls)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@asynccontextmanager
async def launcher(
    stack: Stack, here: MeshSecret, there: MeshSecret
) -> AsyncIterator[RemoteLauncher]:
    async with serving(stack, there) as target:
        remote = RemoteLauncher(target, MeshAccess(secret=here))
        try:
            yield remote
        finally:
            await remote.close()


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


async def test_over_tls_the_scheduler_alone_may_call(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path), "--services", "launcher,scheduler,gateway"]) == 0
    ca = str(tmp_path / "ca.pem")
    files = {
        name: PeerTls(str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}.key"), ca)
        for name in ("launcher", "scheduler", "gateway")
    }
    stack, secret = Stack(), a_secret()
    async with serving(stack, secret, files["launcher"], "scheduler") as target:
        for tls in (files["gateway"], PeerTls(ca=ca), PeerTls()):
            stranger = RemoteLauncher(target, MeshAccess(tls, secret))
            with pytest.raises(LaunchError):
                await stranger.start(LaunchSpec(Role.DECODE))
            await stranger.close()
        assert list(stack.members) == ["gateway"]
        scheduler = RemoteLauncher(target, MeshAccess(files["scheduler"], secret))
        name = await scheduler.start(LaunchSpec(Role.DECODE))
        assert name in stack.members
        await scheduler.close()
