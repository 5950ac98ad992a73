"""Senseless messages to every rpc of every service: an honest refusal, no crash, nothing held."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from prometheus_client import CollectorRegistry

from kvmesh.cli.local_workers import LocalWorkers
from kvmesh.core.config import environment
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.launcher import LauncherServicer
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_building import build_worker
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.v1 import (
    decode_service_pb2,
    inference_service_pb2,
    kv_manager_service_pb2,
    kv_pool_service_pb2,
    launcher_service_pb2,
    prefill_service_pb2,
    scheduler_service_pb2,
)
from kvmesh.v1.launcher_service_pb2_grpc import add_LauncherServiceServicer_to_server
from services.kvmanager.config import IndexConfig, KvManagerConfig
from services.kvmanager.service import build as build_kvmanager
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import build as build_scheduler
from tests.integration.gateway_stack import gateway_stack
from tests.random_messages import RandomMessages
from tests.unit.cli.test_local_workers import Stack as Processes
from tests.unit.cli.test_local_workers import member
from tests.waiting import until

ROUNDS = int(environment("KVMESH_FUZZ_ROUNDS", "1"))
"""More of them for a long run: `make fuzz`."""
CALLS = 60 * ROUNDS
"""Streams per rpc; half of them carry damaged bytes."""
AT_ONCE = 8
PATIENCE_S = 0.3
MET_THE_END = "Internal error from Core"
"""The client's own text for a write that meets the end of its call; at times it cancels instead."""

HONEST = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,  # by us
    grpc.StatusCode.DEADLINE_EXCEEDED,  # ours: the stream lives on
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.OUT_OF_RANGE,
}


@dataclass
class Target:
    """A service that is fuzzed.

    Attributes:
        is_clean: nothing of any request is held.
    """

    context: ServiceContext
    is_clean: Callable[[], bool]


@asynccontextmanager
async def scheduler(_: Path) -> AsyncIterator[Target]:
    async with serving("scheduler", SchedulerConfig(), build_scheduler) as context:
        yield Target(context, lambda: True)


@asynccontextmanager
async def kvmanager(_: Path) -> AsyncIterator[Target]:
    config = KvManagerConfig(index=IndexConfig(store="memory"))
    async with serving("kvmanager", config, build_kvmanager) as context:
        yield Target(context, lambda: True)


@asynccontextmanager
async def worker(_: Path) -> AsyncIterator[Target]:
    workers: list[Worker] = []

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        metrics = WorkerMetrics(CollectorRegistry())
        workers.append(await build_worker(config, context, metrics))

    config = WorkerConfig(
        server=ServerConfig(),
        worker=WorkerSection(id="w", scheduler_targets="", kvmanager_target="", lease_s=1.0),
        engine=EngineSection(kind="fake", num_blocks=64),
    )
    async with serving("worker", config, build) as context:
        yield Target(context, lambda: workers[0].is_idle)


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Target]:
    async with gateway_stack(folder, limits={"ttft_deadline_ms": 200}) as stack:
        yield Target(
            stack.context, lambda: stack.gateway.admission.num_open + stack.mesh.num_open == 0
        )


@asynccontextmanager
async def launcher(_: Path) -> AsyncIterator[Target]:
    async def build(config: SchedulerConfig, context: ServiceContext) -> None:
        servicer = LauncherServicer(LocalWorkers(Processes(), member))
        context.add_servicer(add_LauncherServiceServicer_to_server, servicer)

    async with serving("launcher", SchedulerConfig(), build) as context:
        yield Target(context, lambda: True)


SERVICES: list[tuple[Callable[[Path], Any], Any]] = [
    (scheduler, scheduler_service_pb2),
    (kvmanager, kv_manager_service_pb2),
    (worker, prefill_service_pb2),
    (worker, decode_service_pb2),
    (worker, kv_pool_service_pb2),
    (gateway, inference_service_pb2),
    (launcher, launcher_service_pb2),
    (kvmanager, reflection_pb2),
]


async def call_once(
    channel: grpc.aio.Channel, method: MethodDescriptor, messages: RandomMessages, number: int
) -> tuple[str, grpc.StatusCode, str]:
    """One call with one or several messages; how it ended."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    count = messages.random.randint(1, 6) if method.client_streaming else 1
    sent = [messages.make(method.input_type).SerializeToString() for _ in range(count)]
    if number % 2:
        sent[-1] = messages.damaged(sent[-1])
    raw: Any = channel  # bytes as they are
    try:
        if method.client_streaming:
            call = raw.stream_stream(path)(iter(sent), timeout=PATIENCE_S)
        elif method.server_streaming:
            call = raw.unary_stream(path)(sent[0], timeout=PATIENCE_S)
        else:
            call = raw.unary_unary(path)(sent[0], timeout=PATIENCE_S)
            await call
            return path, await call.code(), ""
        async for _ in call:
            pass
        return path, await call.code(), await call.details() or ""
    except grpc.aio.AioRpcError as error:
        return path, error.code(), error.details() or ""
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return path, grpc.StatusCode.CANCELLED, MET_THE_END


def methods_of(module: Any) -> list[MethodDescriptor]:
    services: list[ServiceDescriptor] = list(module.DESCRIPTOR.services_by_name.values())
    return [method for service in services for method in service.methods]


def test_no_service_is_left_out() -> None:
    folder = Path(decode_service_pb2.__file__).parent
    written = {file.name.removesuffix(".py") for file in folder.glob("*_service_pb2.py")}
    fuzzed = {module.__name__.rpartition(".")[2] for _, module in SERVICES}
    assert fuzzed == written | {"reflection_pb2"}


@pytest.mark.parametrize(
    ("start", "module"), SERVICES, ids=[module.DESCRIPTOR.name for _, module in SERVICES]
)
async def test_senseless_messages_are_refused_and_leave_nothing(
    start: Callable[[Path], Any], module: Any, tmp_path: Path
) -> None:
    print("seed", seed := 20261121 + ROUNDS - 1)
    messages = RandomMessages(seed, ("w", "tiny", "p1", "d1", "fake"))
    gate = asyncio.Semaphore(AT_ONCE)
    async with start(tmp_path) as target:
        address = f"127.0.0.1:{target.context.port}"
        async with open_channel(address) as channel:

            async def limited(method: MethodDescriptor, number: int) -> Any:
                async with gate:
                    return await call_once(channel, method, messages, number)

            outcomes = await asyncio.gather(
                *(limited(method, n) for method in methods_of(module) for n in range(CALLS))
            )
        dishonest = Counter(
            outcome
            for outcome in outcomes
            if outcome[1] not in HONEST and outcome[2] != MET_THE_END
        )
        assert not dishonest, sorted(dishonest.items(), key=str)
        assert not target.context.failure.done()
        await until(target.is_clean)
        assert len({code for _, code, _ in outcomes}) > 1  # the fuzzer got past the door
