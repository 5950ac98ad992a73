"""A mesh of real processes with a secret: every rpc of every inner service and every data port is
closed to callers without it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from kvmesh.cli.__main__ import main
from kvmesh.core.details import FleetWorker
from kvmesh.core.mesh_secret import MeshSecret, new_secret
from kvmesh.core.types import WorkerId
from kvmesh.rpc.channels import MeshAccess, open_channel
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.transfer.codec import HEADER, decode_body, decode_header, encode_frame
from kvmesh.transfer.frames import Checksum, ErrorFrame, Frame, HelloOkFrame, LinkOffer
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.sender_protocol import SenderMachine
from kvmesh.v1 import (
    decode_service_pb2,
    inference_service_pb2,
    kv_manager_service_pb2,
    kv_pool_service_pb2,
    launcher_service_pb2,
    prefill_service_pb2,
    scheduler_service_pb2,
)
from tests.e2e.api_client import ApiClient
from tests.mesh_processes import Mesh, fake_tokens, running_mesh
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)

INNER: dict[str, tuple[Any, ...]] = {
    "scheduler": (scheduler_service_pb2,),
    "kvmanager": (kv_manager_service_pb2,),
    "prefill-0": (prefill_service_pb2, decode_service_pb2, kv_pool_service_pb2),
    "decode-0": (prefill_service_pb2, decode_service_pb2, kv_pool_service_pb2),
}
"""What each process serves to others of the mesh."""

WRONG = MeshAccess(secret=MeshSecret(new_secret()))
REFUSED = grpc.StatusCode.UNAUTHENTICATED
PROMPT = list(range(100, 185))


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with running_mesh(tmp_path, 1, 1) as running:
        yield running


def methods(*modules: Any) -> list[MethodDescriptor]:
    return [
        method
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


async def outcome(address: str, access: MeshAccess, method: MethodDescriptor) -> grpc.StatusCode:
    """How a call ends that sends nothing, or one empty message; OK if it was let in and waits."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    empty = GetMessageClass(method.input_type)().SerializeToString()
    async with open_channel(address, access) as channel:
        raw: Any = channel
        try:
            if method.client_streaming:
                call = raw.stream_stream(path)(timeout=10)
                # With an iterator of requests in its place, a call that is refused before it has
                # come to its end counts as cancelled by this side.
                with contextlib.suppress(grpc.aio.InternalError):
                    await call.done_writing()
                await call.read()
            elif method.server_streaming:
                await raw.unary_stream(path)(empty, timeout=10).read()
            else:
                await raw.unary_unary(path)(empty, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_every_service_is_asked() -> None:
    folder = Path(decode_service_pb2.__file__).parent
    written = {file.name.removesuffix(".py") for file in folder.glob("*_service_pb2.py")}
    asked = {module.__name__.rpartition(".")[2] for each in INNER.values() for module in each}
    # The gateway's API is its clients', who have keys of their own; a launcher that is no service
    # of a mesh is asked in tests/integration/test_launcher_service.py.
    others = {inference_service_pb2, launcher_service_pb2}
    assert asked | {module.__name__.rpartition(".")[2] for module in others} == written


async def test_only_members_are_served(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    async with ApiClient(mesh.url) as client:
        answer = await client.complete(PROMPT, max_tokens=20)
        assert answer.token_ids == fake_tokens(PROMPT, 20)
    await check_rpcs(mesh)
    await check_data_ports(mesh)
    await check_commands(mesh, capsys)
    check_no_secret_is_told(mesh)


async def check_rpcs(mesh: Mesh) -> None:
    asked = [(name, method) for name in INNER for method in methods(*INNER[name])]
    assert len(asked) >= 14
    ends = {
        who: await asyncio.gather(
            *(outcome(mesh[name].address, access, method) for name, method in asked)
        )
        for who, access in {
            "nobody": MeshAccess(),
            "stranger": WRONG,
            "member": mesh.access,
        }.items()
    }
    for (name, method), nobody, stranger, member in zip(asked, *ends.values(), strict=True):
        assert (nobody, stranger) == (REFUSED, REFUSED), (name, method.full_name)
        assert member is not REFUSED, (name, method.full_name)
    # Clients of the API are no members, and need not be.
    for method in methods(inference_service_pb2):
        assert await outcome(mesh["gateway"].address, MeshAccess(), method) is not REFUSED


async def workers_of(mesh: Mesh) -> tuple[FleetWorker, ...]:
    watch = FleetWatch([mesh["scheduler"].address], mesh.access)
    task = asyncio.create_task(watch.run())
    await until(lambda: len(watch.workers) == 2, "two workers are seen")
    task.cancel()
    await asyncio.wait({task})
    return watch.workers


async def greet(worker: FleetWorker, secret: MeshSecret | None, life: int = 0) -> Frame | None:
    """The answer of a worker's data port to a greeting."""
    info = worker.info
    me = ChannelIdentity(WorkerId("stranger"), 1, info.layout, secret)
    offer = LinkOffer(1, 0, Checksum.CRC32C)
    machine = SenderMachine(me, info.worker_id, life or info.incarnation, offer)
    endpoint = info.data_endpoint
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        writer.write(encode_frame(machine.hello()))
        async with asyncio.timeout(20):
            header = decode_header(await reader.readexactly(HEADER.size))
            return decode_body(header, await reader.readexactly(header.body_bytes))
    finally:
        writer.close()


async def check_data_ports(mesh: Mesh) -> None:
    for worker in await workers_of(mesh):
        for secret in (None, WRONG.secret):
            for life in (0, 12345):  # also a wrong one: nobody else is told which life this is
                answer = await greet(worker, secret, life)
                assert isinstance(answer, ErrorFrame)
                assert answer.reason == "secret"
                assert str(worker.info.incarnation) not in answer.message
        assert isinstance(await greet(worker, mesh.access.secret), HelloOkFrame)


async def check_commands(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = ("fleet", "cordon", "prefill-0", "--scheduler", mesh["scheduler"].address)

    async def kvmesh(*more: str) -> tuple[int, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(main, [*scheduler, *more])
        return code, capsys.readouterr().err

    code, text = await kvmesh("--state-dir", str(mesh.folder / "none"))
    assert code == 1
    assert "--secret-file" in text
    wrong = mesh.folder / "wrong.secret"
    wrong.write_text(new_secret())
    code, text = await kvmesh("--secret-file", str(wrong))
    assert code == 1
    assert "another secret than this mesh" in text
    assert (await kvmesh("--secret-file", str(mesh.secret_file)))[0] == 0


def check_no_secret_is_told(mesh: Mesh) -> None:
    secret = mesh.secret_file.read_text()
    files = [*mesh.folder.glob("*.log"), *mesh.trace_files]
    assert len(files) >= 8
    for file in files:
        assert secret not in file.read_text(errors="replace"), file
    for child in mesh.children.values():
        assert child.process is not None
        command = Path(f"/proc/{child.process.pid}/cmdline").read_text(errors="replace")
        assert secret not in command
