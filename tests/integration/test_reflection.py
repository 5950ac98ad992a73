"""gRPC server reflection, asked by gRPC's own reflection client, which has no protos of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from kvmesh.cli.certs import main as make_certs
from kvmesh.rpc.channels import MeshAccess, PeerTls, open_channel
from kvmesh.runtime.app import ServerConfig, serving
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import build as build_scheduler
from tests.integration.test_grpc_fuzz import gateway, kvmanager, scheduler, worker

COMMON = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.mark.parametrize(
    ("start", "own"),
    [
        (scheduler, {"SchedulerService"}),
        (kvmanager, {"KvManagerService"}),
        (worker, {"PrefillService", "DecodeService", "KvPoolService"}),
        (gateway, {"InferenceService"}),
    ],
)
async def test_every_service_tells_what_it_serves(
    start: Callable[[Path], Any], own: set[str], tmp_path: Path
) -> None:
    def ask(address: str) -> tuple[set[str], set[str]]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            names = set(database.get_services())
            pool = DescriptorPool(database)
            files = {pool.FindServiceByName(name).file.name for name in names - COMMON}
            return names, files

    async with start(tmp_path) as target:
        names, files = await asyncio.to_thread(ask, f"127.0.0.1:{target.context.port}")
    assert names == COMMON | {f"kvmesh.v1.{name}" for name in own}
    assert all(name.startswith("kvmesh/v1/") for name in files)


async def test_a_method_is_called_with_messages_built_from_what_is_told(tmp_path: Path) -> None:
    def call(address: str) -> str:
        with grpc.insecure_channel(address) as channel:
            pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
            service = pool.FindServiceByName("kvmesh.v1.SchedulerService")
            method = service.methods_by_name["OrderWorker"]
            request: Any = GetMessageClass(method.input_type)(worker_id="nobody", drain={})
            ask: Any = channel.unary_unary(
                f"/{service.full_name}/{method.name}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            with pytest.raises(grpc.RpcError) as caught:
                ask(request, timeout=10)
            error: Any = caught.value
            return f"{error.code().name}: {error.details()}"

    async with scheduler(tmp_path) as target:
        answer = await asyncio.to_thread(call, f"127.0.0.1:{target.context.port}")
    assert answer.startswith("NOT_FOUND: ")
    assert "nobody" in answer


async def test_only_callers_that_are_named_may_ask(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path), "--services", "scheduler,gateway,operator"]) == 0

    def files(name: str) -> PeerTls:
        cert, key, ca = (str(tmp_path / file) for file in (f"{name}.pem", f"{name}.key", "ca.pem"))
        return PeerTls(cert, key, ca)

    callers = "gateway:Route,operator:ServerReflectionInfo"
    server = ServerConfig(tls=files("scheduler"), callers=callers)
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with serving("scheduler", SchedulerConfig(server=server), build_scheduler) as service:

        async def ask(name: str) -> grpc.StatusCode:
            access = MeshAccess(files(name))
            async with open_channel(f"127.0.0.1:{service.port}", access) as channel:
                list_services = b"\x3a\x00"  # field 7, empty
                stream: Any = channel.stream_stream(path)
                call = stream(iter([list_services]), timeout=10)
                try:
                    assert b"kvmesh.v1.SchedulerService" in await call.read()
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

        assert await ask("operator") is grpc.StatusCode.OK
        assert await ask("gateway") is grpc.StatusCode.PERMISSION_DENIED
