"""Replays rounds of requests through all five services in this process; the engines stand still
while the requests of a round come in.

So what every decision sees is a fact and not a matter of time: who holds which blocks, and which
requests of the round run where.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry

from kvmesh.core.clock import SystemClock
from kvmesh.core.types import Role, WorkerId, WorkerLoad
from kvmesh.engine.fake import FakeRunner
from kvmesh.engine.protocol import SequenceChunk, StepResult
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.metadata.redis_client import RedisConfig
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import (
    EngineSection,
    FetchSection,
    WorkerConfig,
    WorkerSection,
)
from kvmesh.runtime.worker_loading import begin
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest
from services.gateway.config import (
    GatewayConfig,
    HttpConfig,
    LimitsConfig,
    ModelConfig,
    SchedulerTargets,
)
from services.gateway.service import Gateway, start_gateway
from services.kvmanager.config import KvManagerConfig, LimitConfig, PoolConfig
from services.kvmanager.service import build as build_kvmanager
from services.scheduler.config import (
    FleetConfig,
    KvManagerTarget,
    PlanningConfig,
    RoutingConfig,
    SchedulerConfig,
)
from services.scheduler.service import Scheduler, start_scheduler
from tests.unit.gateway.tiny_model import write_model
from tests.waiting import until
from tests.worker_driver import until_idle

MODEL = "simulated"
NUM_BLOCKS = 400
VOCAB_SIZE = 300
Round = Sequence[TraceRequest]


class GatedRunner(FakeRunner):
    """A fake engine that computes only while the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(
            name=MODEL,
            vocab_size=VOCAB_SIZE,
            max_model_len=NUM_BLOCKS * TRACE_BLOCK,
            num_blocks=NUM_BLOCKS,
            block_size=TRACE_BLOCK,
        )
        self._gate = gate

    def execute(self, chunks: Sequence[SequenceChunk]) -> StepResult:
        """Waits for the gate, then computes."""
        self._gate.wait()
        return super().execute(chunks)


def prompt_of(request: TraceRequest) -> list[int]:
    """Tokens for a trace's prompt: equal ids are equal blocks."""
    tokens: list[int] = []
    for each in request.hash_ids:
        draw = random.Random(each)
        tokens += [draw.randrange(2, VOCAB_SIZE) for _ in range(TRACE_BLOCK)]
    return tokens[: request.input_tokens]


@dataclass(frozen=True)
class WorkerPlan:
    """A worker to start."""

    name: str
    role: Role
    prefill_slots: int
    decode_slots: int
    cluster: str = "home"
    scenario: str = ""


class LiveMesh:
    """The five services, and the gate of their engines."""

    def __init__(self, scheduler: Scheduler, gateway: Gateway, workers: list[Worker]) -> None:
        self.scheduler = scheduler
        self.gateway = gateway
        self.workers = workers
        self.gate = threading.Event()

    async def replay(self, rounds: Sequence[Round], *, together: bool = False) -> None:
        """Sends the rounds; a request is called `r` and its number.

        Args:
            together: those of a round at once; else each after the one before was accepted.
        """
        url = f"http://127.0.0.1:{self.gateway.http_port}/v1/completions"
        number = 0
        async with aiohttp.ClientSession() as session:
            for requests in rounds:
                self.gate.clear()
                async with asyncio.TaskGroup() as open_requests:
                    for sent in [requests] if together else [[each] for each in requests]:
                        accepted = self._num_accepted() + len(sent)
                        for request in sent:
                            ask = _complete(session, url, f"r{number}", request)
                            open_requests.create_task(ask)
                            number += 1
                        await self._settled(accepted, sent)
                    self.gate.set()
                await until_idle(*self.workers)
                await until(self.view_is_exact, "the scheduler knows that all are idle")
                for request in requests:
                    await until(self._match_is_exact(request), "the kvmanager knows all blocks")

    async def _settled(self, accepted: int, sent: Round) -> None:
        await until(lambda: self._num_accepted() == accepted, "the requests are accepted")
        await until(self._fetches_are_over, "what is fetched is there")
        await until(self.view_is_exact, "the scheduler knows all loads")
        for request in sent:
            await until(self._match_is_exact(request), "and who holds what")

    def _num_accepted(self) -> int:
        return sum(worker.prefill.num_attempts for worker in self.workers)

    def _fetches_are_over(self) -> bool:
        return all(worker.fetcher.is_idle and worker.pool.is_idle for worker in self.workers)

    def view_is_exact(self) -> bool:
        """The fleet shows what is there, and nothing that was routed counts twice."""
        now = SystemClock().now()
        seen = {each.worker_id: each for each in self.scheduler.fleet.view(now).workers}
        return all(
            _counted(seen[worker.worker_id].load) == _counted(worker.load())
            and not seen[worker.worker_id].prefill_in_flight
            and not seen[worker.worker_id].decode_in_flight
            for worker in self.workers
        )

    def _match_is_exact(self, request: TraceRequest) -> Callable[[], object]:
        layout = self.workers[0].core.spec.layout
        root = root_hash(layout.model_fingerprint, cache_salt="")
        hashes = tuple(chain_hashes(root, prompt_of(request), TRACE_BLOCK))
        held = {w.worker_id: len(w.core.pool.match(hashes)) for w in self.workers}
        expected = {name: count for name, count in held.items() if count}
        lookup, index = self.scheduler.prefixes, self.scheduler.index
        assert lookup is not None
        assert index is not None

        async def fact() -> bool:
            # Routes ask the scheduler's index, which follows the kvmanager.
            if not index.known or dict(index.match(layout.model_fingerprint, hashes)) != expected:
                return False
            answer = await lookup.match(layout.model_fingerprint, hashes, PATIENCE_S)
            return {each.worker_id: each.num_blocks for each in answer.matches} == expected

        return fact


def _counted(load: WorkerLoad) -> WorkerLoad:
    """All that decisions read: one that is told late would count for another request."""
    return WorkerLoad(
        prefill_active=load.prefill_active,
        decode_running=load.decode_running,
        decode_reserved=load.decode_reserved,
        decode_preempted=load.decode_preempted,
        blocks_free=load.blocks_free,
        draining=load.draining,
        pending_tokens=load.pending_tokens,
        prefill_sending=load.prefill_sending,
        sending_bytes=load.sending_bytes,
    )


async def _complete(
    session: aiohttp.ClientSession, url: str, name: str, request: TraceRequest
) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt_of(request),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    headers = {"x-request-id": name, "x-kvmesh-scenario": request.scenario}
    async with session.post(url, json=body, headers=headers) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == request.output_tokens


PATIENCE_S = 10.0
"""No step of a replay gives up on another one because the machine is busy."""

LEASE_S = 60.0
"""No lease ends during a replay."""


def _kvmanager(server: ServerConfig, redis: RedisConfig) -> KvManagerConfig:
    limits = LimitConfig(lookup_timeout_s=PATIENCE_S)
    patient = replace(redis, timeout_s=PATIENCE_S)
    # Copies of hot prefixes come when time has passed, and the simulator has none of them.
    pool = PoolConfig(budget_mb_s=0.0)
    return KvManagerConfig(server=server, redis=patient, limits=limits, pool=pool)


@asynccontextmanager
async def live_mesh(
    folder: Path, redis: RedisConfig, policy: str, plans: Sequence[WorkerPlan]
) -> AsyncIterator[LiveMesh]:
    """Starts all services and waits until requests can be served."""
    write_model(folder)
    server = ServerConfig(port=0)
    async with AsyncExitStack() as stack:
        kvmanager = await stack.enter_async_context(
            serving("kvmanager", _kvmanager(server, redis), build_kvmanager)
        )
        schedulers: list[Scheduler] = []

        async def build_scheduler(config: SchedulerConfig, context: ServiceContext) -> None:
            schedulers.append(await start_scheduler(config, context))

        config = SchedulerConfig(
            server=server,
            routing=RoutingConfig(policy=policy),
            planning=PlanningConfig(roles="off"),
            fleet=FleetConfig(lease_s=LEASE_S),
            kvmanager=KvManagerTarget(f"127.0.0.1:{kvmanager.port}", timeout_s=PATIENCE_S),
        )
        scheduler = await stack.enter_async_context(serving("scheduler", config, build_scheduler))
        gateways: list[Gateway] = []
        mesh_workers: list[Worker] = []
        gate = threading.Event()
        gate.set()
        stack.callback(gate.set)  # a test that fails must not leave a thread waiting
        for plan in plans:
            await stack.enter_async_context(
                _worker(plan, gate, scheduler.port, kvmanager.port, mesh_workers)
            )

        async def build_gateway(config: GatewayConfig, context: ServiceContext) -> None:
            gateways.append(await start_gateway(config, context))

        target = f"127.0.0.1:{scheduler.port}"
        front = GatewayConfig(
            server=server,
            http=HttpConfig(port=0),
            model=ModelConfig(path=str(folder), served_name=MODEL),
            scheduler=SchedulerTargets(targets=target, route_timeout_s=2 * PATIENCE_S),
            limits=LimitsConfig(ttft_deadline_ms=60_000, stall_s=LEASE_S),
        )
        await stack.enter_async_context(serving("gateway", front, build_gateway))
        stack.callback(gate.set)
        mesh = LiveMesh(schedulers[0], gateways[0], mesh_workers)
        mesh.gate = gate
        await until(
            lambda: gateways[0].sessions.num_connected == len(plans), "the gateway is connected"
        )
        # Until their peers are connected, workers count as draining.
        await until(mesh.view_is_exact, "the scheduler takes all workers")
        yield mesh


@asynccontextmanager
async def _worker(
    plan: WorkerPlan,
    gate: threading.Event,
    scheduler_port: int,
    kvmanager_port: int,
    made: list[Worker],
) -> AsyncIterator[None]:
    section = WorkerSection(
        id=plan.name,
        role=plan.role.value,
        cluster=plan.cluster,
        scenario=plan.scenario,
        scheduler_targets=f"127.0.0.1:{scheduler_port}",
        kvmanager_target=f"127.0.0.1:{kvmanager_port}",
        prefill_slots=plan.prefill_slots,
        decode_slots=plan.decode_slots,
        lease_s=LEASE_S,
        stall_s=PATIENCE_S,
    )
    engine = EngineSection(kind="fake", max_batch_tokens=4096)
    # What is not fetched in time is computed, and the simulator knows no such time.
    fetch = FetchSection(timeout_s=2 * PATIENCE_S, stall_s=PATIENCE_S, lease_s=LEASE_S)
    config = replace(
        WorkerConfig(), worker=section, engine=engine, fetch=fetch, server=ServerConfig(port=0)
    )

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        runner = GatedRunner(gate)
        context.stack.callback(runner.close)
        metrics = WorkerMetrics(CollectorRegistry())
        worker = Worker(config, context, runner, metrics, loading=begin())
        await worker.start()
        made.append(worker)

    async with serving("worker", config, build):
        assert made[-1].worker_id == WorkerId(plan.name)
        yield
