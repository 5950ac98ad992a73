"""Services that trust only certificates of their own CA (mTLS)."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvmesh.cli.certs import main as make_certs
from kvmesh.cli.health import SERVING, HealthTls, check_health
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import Refusal, RefusalReason, RequestId, RouteQuery
from kvmesh.rpc.channels import MeshAccess, PeerTls, open_channel
from kvmesh.rpc.direct import DirectClient
from kvmesh.rpc.fleet import FleetWatch, RouteClient
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker_building import build_worker
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.v1.scheduler_service_pb2 import (
    ListGroupsRequest,
    OrderWorkerRequest,
    RouteResponse,
    WatchFleetRequest,
)
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import build as build_scheduler
from tests.waiting import until

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


def _openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> PeerTls:
    """A CA and one certificate for this host, good for both ends."""
    folder = tmp_path_factory.mktemp("certs")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(
        *("req", "-x509", *key, "-subj", "/CN=test-ca", "-days", "1"),
        *("-keyout", "ca.key", "-out", "ca.pem"),
        folder=folder,
    )
    _openssl(
        *("req", "-x509", *key, "-subj", "/CN=127.0.0.1", "-days", "1"),
        *("-addext", "subjectAltName=IP:127.0.0.1", "-CA", "ca.pem", "-CAkey", "ca.key"),
        *("-keyout", "own.key", "-out", "own.pem"),
        folder=folder,
    )
    return PeerTls(str(folder / "own.pem"), str(folder / "own.key"), str(folder / "ca.pem"))


async def test_a_worker_joins_over_mtls_and_strangers_stay_out(tls: PeerTls) -> None:
    server = ServerConfig(tls=tls)

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        await build_worker(config, context, WorkerMetrics(CollectorRegistry()))

    async with serving("scheduler", SchedulerConfig(server=server), build_scheduler) as scheduler:
        target = f"127.0.0.1:{scheduler.port}"
        config = WorkerConfig(
            server=server,
            worker=WorkerSection(id="w", scheduler_targets=target, kvmanager_target=""),
            engine=EngineSection(kind="fake"),
        )
        async with serving("worker", config, build) as worker:
            watch = FleetWatch([target], MeshAccess(tls))
            scheduler.spawn(watch.run(), "watch")
            await _until_one_worker(watch)
            own = HealthTls(tls.ca, tls.cert, tls.key)
            for port in (scheduler.port, worker.port):
                address = f"127.0.0.1:{port}"
                assert await _health(address, own) == SERVING
                assert await _health(address, HealthTls(ca=tls.ca)) != SERVING
                assert await _health(address, HealthTls()) != SERVING


async def test_routes_travel_encrypted_on_a_socket_of_their_own(tls: PeerTls) -> None:
    config = SchedulerConfig(server=ServerConfig(tls=tls))
    async with serving("scheduler", config, build_scheduler) as scheduler:
        client = RouteClient([f"127.0.0.1:{scheduler.port}"], MeshAccess(tls))
        scheduler.spawn(client.run(), "routes")
        assert await client.wait_connected(10)
        assert scheduler.direct.num_open == 1
        query = RouteQuery(RequestId("r"), "m", 5, 5, (), "", frozenset(), 1000)
        refusal = await client.route(query, timeout_s=10)
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.NO_WORKERS
        # Who speaks no TLS gets no further than to be cut.
        stranger = DirectClient("127.0.0.1", RouteResponse)
        offer = f"{scheduler.direct.port} {'00' * 16}"
        assert await stranger.connect(offer, lambda _: None) is None
        assert scheduler.direct.num_open == 1


async def test_callers_may_be_let_in_without_a_certificate(tls: PeerTls) -> None:
    """A gateway's gRPC port for clients: it shows its certificate and asks for none."""
    server = ServerConfig(tls=replace(tls, verify_callers=False))
    async with serving("scheduler", SchedulerConfig(server=server), build_scheduler) as scheduler:
        address = f"127.0.0.1:{scheduler.port}"
        assert await _health(address, HealthTls(ca=tls.ca)) == SERVING
        assert await _health(address, HealthTls()) != SERVING


async def test_certificates_may_be_for_the_mesh_in_place_of_addresses(tmp_path: Path) -> None:
    """As where a launcher starts workers: nobody knows their addresses before."""
    assert make_certs(["--out", str(tmp_path), "--hosts", "mesh.example"]) == 0
    by_address = _files(tmp_path, "scheduler")
    by_name = replace(by_address, peer_name="mesh.example")

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        await build_worker(config, context, WorkerMetrics(CollectorRegistry()))

    config = SchedulerConfig(server=ServerConfig(tls=by_name))
    async with serving("scheduler", config, build_scheduler) as scheduler:
        target = f"127.0.0.1:{scheduler.port}"
        worker = WorkerConfig(
            server=ServerConfig(tls=by_name),
            worker=WorkerSection(id="w", scheduler_targets=target, kvmanager_target=""),
            engine=EngineSection(kind="fake"),
        )
        async with serving("worker", worker, build):
            watch = FleetWatch([target], MeshAccess(by_name))
            scheduler.spawn(watch.run(), "watch")
            await _until_one_worker(watch)
        client = RouteClient([target], MeshAccess(by_name))
        scheduler.spawn(client.run(), "routes")
        assert await client.wait_connected(10)
        assert scheduler.direct.num_open == 1
        for wrong in (by_address, replace(by_address, peer_name="another.example")):
            async with open_channel(target, MeshAccess(wrong)) as channel:
                stub: Any = SchedulerServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.ListGroups(ListGroupsRequest(), timeout=10)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def _files(folder: Path, name: str) -> PeerTls:
    cert, key, ca = (str(folder / file) for file in (f"{name}.pem", f"{name}.key", "ca.pem"))
    return PeerTls(cert, key, ca)


async def test_only_named_services_may_call(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path)]) == 0

    server = ServerConfig(tls=_files(tmp_path, "scheduler"), callers="gateway, prefill")
    async with serving("scheduler", SchedulerConfig(server=server), build_scheduler) as scheduler:
        address = f"127.0.0.1:{scheduler.port}"

        async def call(name: str) -> grpc.StatusCode:
            async with open_channel(address, MeshAccess(_files(tmp_path, name))) as channel:
                stub: Any = SchedulerServiceStub(channel)
                try:
                    async for _ in stub.WatchFleet(WatchFleetRequest(), timeout=10):
                        return grpc.StatusCode.OK
                except grpc.aio.AioRpcError as error:
                    return error.code()
            raise AssertionError("a watch does not end")

        assert await call("gateway") is grpc.StatusCode.OK
        assert await call("decode") is grpc.StatusCode.PERMISSION_DENIED
        async with open_channel(address, MeshAccess(_files(tmp_path, "decode"))) as channel:
            stub: Any = SchedulerServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="decode may not call"):
                await stub.OrderWorker(OrderWorkerRequest(worker_id="w"), timeout=10)
        decode = _files(tmp_path, "decode")
        trusted = HealthTls(decode.ca, decode.cert, decode.key)
        assert await _health(address, trusted) == SERVING  # open to the CA's own


async def test_a_name_may_be_given_one_rpc_and_no_other(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path), "--services", "scheduler,prefill,operator"]) == 0

    callers = "prefill:RegisterWorker, operator:OrderWorker, operator:WatchFleet"
    server = ServerConfig(tls=_files(tmp_path, "scheduler"), callers=callers)
    async with serving("scheduler", SchedulerConfig(server=server), build_scheduler) as scheduler:

        async def answer(name: str, rpc: str, request: Any) -> grpc.StatusCode:
            async with open_channel(
                f"127.0.0.1:{scheduler.port}", MeshAccess(_files(tmp_path, name))
            ) as channel:
                stub: Any = SchedulerServiceStub(channel)
                call = getattr(stub, rpc)(request, timeout=10)
                try:
                    # A stream that is let in would go on; its first answer is enough.
                    await (call if rpc == "OrderWorker" else call.read())
                except grpc.aio.AioRpcError as error:
                    return error.code()
                return grpc.StatusCode.OK

        order, watch = OrderWorkerRequest(worker_id="w"), WatchFleetRequest()
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert await answer("prefill", "OrderWorker", order) is denied
        assert await answer("prefill", "WatchFleet", watch) is denied
        assert await answer("operator", "OrderWorker", order) is not denied
        assert await answer("operator", "WatchFleet", watch) is grpc.StatusCode.OK
        assert await answer("operator", "RegisterWorker", iter(())) is denied
        assert await answer("prefill", "RegisterWorker", iter(())) is not denied


@pytest.mark.parametrize(
    "mistyped", ["prefill:RegisterWorkr", "gateway:Publish", "gateway:", ":WatchFleet"]
)
async def test_a_caller_of_an_rpc_that_is_not_there_ends_the_start(
    tmp_path: Path, mistyped: str
) -> None:
    assert make_certs(["--out", str(tmp_path)]) == 0
    server = ServerConfig(
        tls=_files(tmp_path, "scheduler"), callers=f"gateway,decode:RegisterWorker,{mistyped}"
    )
    rpcs = "ApplyGroup, ListAdapters, ListGroups, LoadAdapter, OrderWorker, RegisterWorker, "
    rpcs += "RemoveAdapter, Route, ServerReflectionInfo, WatchFleet"
    named = f"'{mistyped}'.*: {rpcs}$"
    with pytest.raises(ConfigError, match=named):
        async with serving("scheduler", SchedulerConfig(server=server), build_scheduler):
            pass


async def test_names_of_callers_need_mtls() -> None:
    server = ServerConfig(callers="gateway")
    with pytest.raises(ConfigError, match=r"server\.callers needs mTLS"):
        async with serving("scheduler", SchedulerConfig(server=server), build_scheduler):
            pass


async def _until_one_worker(watch: FleetWatch) -> None:
    await until(lambda: watch.workers, "a worker is known")


async def _health(address: str, tls: HealthTls) -> str:
    return await asyncio.to_thread(check_health, address, 3.0, tls)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pem"):
        check_health("127.0.0.1:1", 0.1, HealthTls(ca="none.pem"))
