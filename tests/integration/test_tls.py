"""Services that trust only certificates of their own CA (mTLS)."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvmesh.cli.health import SERVING, HealthTls, check_health
from kvmesh.rpc.channels import TlsConfig
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker import build_worker
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import build as build_scheduler

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


def _openssl(*arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
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
    return TlsConfig(str(folder / "own.pem"), str(folder / "own.key"), str(folder / "ca.pem"))


async def test_a_worker_joins_over_mtls_and_strangers_stay_out(tls: TlsConfig) -> None:
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
            watch = FleetWatch([target], tls)
            scheduler.spawn(watch.run(), "watch")
            await _until_one_worker(watch)
            own = HealthTls(tls.ca, tls.cert, tls.key)
            for port in (scheduler.port, worker.port):
                address = f"127.0.0.1:{port}"
                assert await _health(address, own) == SERVING
                assert await _health(address, HealthTls(ca=tls.ca)) != SERVING
                assert await _health(address, HealthTls()) != SERVING


async def test_callers_may_be_let_in_without_a_certificate(tls: TlsConfig) -> None:
    """A gateway's gRPC port for clients: it shows its certificate and asks for none."""
    server = ServerConfig(tls=replace(tls, verify_callers=False))
    async with serving("scheduler", SchedulerConfig(server=server), build_scheduler) as scheduler:
        address = f"127.0.0.1:{scheduler.port}"
        assert await _health(address, HealthTls(ca=tls.ca)) == SERVING
        assert await _health(address, HealthTls()) != SERVING


async def _until_one_worker(watch: FleetWatch) -> None:
    async with asyncio.timeout(10):
        while not watch.workers:
            await asyncio.sleep(0.01)


async def _health(address: str, tls: HealthTls) -> str:
    return await asyncio.to_thread(check_health, address, 3.0, tls)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pem"):
        check_health("127.0.0.1:1", 0.1, HealthTls(ca="none.pem"))
