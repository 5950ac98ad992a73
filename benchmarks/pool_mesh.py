"""The services for the benchmark of the pool, in this process, with the deterministic engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from benchmarks.result import ROOT
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_building import build_worker
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from services.gateway.config import GatewayConfig, HttpConfig, ModelConfig, SchedulerTargets
from services.gateway.service import Gateway, start_gateway
from services.kvmanager.config import IndexConfig, KvManagerConfig, PoolConfig
from services.kvmanager.service import build as build_kvmanager
from services.scheduler.config import KvManagerTarget, PlanningConfig, SchedulerConfig
from services.scheduler.service import build as build_scheduler

MODEL = ROOT / "models" / "pydoc-6m"
BLOCK_SIZE = 16
NUM_BLOCKS = 4096
WORKERS = 4
"""That run prompts; one more generates."""

STEP_S, STEP_TOKENS = 0.01, 128
NO_COPIES = PoolConfig(budget_mb_s=0.0, window_s=2.0)
COPIES = PoolConfig(budget_mb_s=100.0, window_s=2.0)
HASHED = PoolConfig(budget_mb_s=100.0, window_s=2.0, placement="hashed")

START_POLLS = 400
"""Looks for workers that are connected, or prefixes that are known, every 50 ms."""


@dataclass(frozen=True, slots=True)
class PoolMesh:
    """Where the services are.

    Attributes:
        url: of the gateway.
        kvmanager: `host:port`.
        workers: the last one generates.
    """

    url: str
    kvmanager: str
    workers: list[Worker]


@asynccontextmanager
async def pool_mesh(pool: PoolConfig) -> AsyncIterator[PoolMesh]:
    """All services in this process."""
    server = ServerConfig(port=0)
    async with AsyncExitStack() as stack:
        kvmanager = await stack.enter_async_context(
            serving(
                "kvmanager",
                KvManagerConfig(server=server, index=IndexConfig(store="memory"), pool=pool),
                build_kvmanager,
            )
        )
        target = f"127.0.0.1:{kvmanager.port}"
        config = SchedulerConfig(
            server=server,
            planning=PlanningConfig(roles="off"),
            kvmanager=KvManagerTarget(target=target),
        )
        scheduler = await stack.enter_async_context(serving("scheduler", config, build_scheduler))
        targets = f"127.0.0.1:{scheduler.port}"
        made: list[Worker] = []
        for number in range(WORKERS + 1):
            section = WorkerSection(
                id=f"w{number}",
                role="prefill" if number < WORKERS else "decode",
                prefill_slots=8,
                scheduler_targets=targets,
                kvmanager_target=target,
            )
            await stack.enter_async_context(_worker(section, made))
        gateways: list[Gateway] = []

        async def build_gateway(config: GatewayConfig, context: ServiceContext) -> None:
            gateways.append(await start_gateway(config, context))

        front = GatewayConfig(
            server=server,
            http=HttpConfig(port=0),
            model=ModelConfig(path=str(MODEL)),
            scheduler=SchedulerTargets(targets=targets),
        )
        await stack.enter_async_context(serving("gateway", front, build_gateway))
        for _ in range(START_POLLS):
            if gateways[0].sessions.num_connected > WORKERS:
                break
            await asyncio.sleep(0.05)
        yield PoolMesh(f"http://127.0.0.1:{gateways[0].http_port}", target, made)


@asynccontextmanager
async def _worker(section: WorkerSection, made: list[Worker]) -> AsyncIterator[None]:
    engine = EngineSection(
        kind="fake",
        model=str(MODEL),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_batch_tokens=STEP_TOKENS,
        fake_step_s=STEP_S,
    )
    config = replace(WorkerConfig(), worker=section, engine=engine, server=ServerConfig(port=0))

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        made.append(await build_worker(config, context, WorkerMetrics(CollectorRegistry())))

    async with serving("worker", config, build):
        yield
