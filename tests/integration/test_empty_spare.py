"""An empty spare waits at a real scheduler, and loads the model of a worker that is lost."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from kvmesh.core.empty_spare import Origin
from kvmesh.core.types import Role, WorkerInfo
from kvmesh.rpc.channels import open_channel
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.runtime.app import ServiceContext, serving
from kvmesh.runtime.empty_spare import build_worker_or_spare
from kvmesh.runtime.worker_config import EngineSection, WorkerConfig, WorkerSection
from kvmesh.runtime.worker_metrics import WorkerMetrics
from kvmesh.v1.decode_service_pb2_grpc import DecodeServiceStub
from tests.integration.scheduler_mesh import FakeWorker, address, in_background, scheduler
from tests.unit.policy.fleet_examples import LAYOUT, worker_info
from tests.waiting import until


@asynccontextmanager
async def empty_spare(target: str) -> AsyncIterator[ServiceContext]:
    config = WorkerConfig(
        worker=WorkerSection(
            id="e", role="spare", cluster="east", scheduler_targets=target, kvmanager_target=""
        ),
        engine=EngineSection(kind="fake"),
    )

    async def build(config: WorkerConfig, context: ServiceContext) -> None:
        await build_worker_or_spare(config, context, WorkerMetrics(CollectorRegistry()))

    async with serving("decode", config, build) as context:
        yield context


def a_worker(checkpoint: str) -> WorkerInfo:
    """One that loads its model in a tenth of the time in which it starts."""
    layout = dataclasses.replace(LAYOUT, engine="fake")
    origin = Origin(checkpoint, start_s=10.0, load_s=1.0)
    return worker_info("d0", Role.DECODE, layout=layout, scenario="doc", origin=origin)


@asynccontextmanager
async def a_loss(checkpoint: str) -> AsyncIterator[tuple[FleetWatch, ServiceContext]]:
    """A scheduler and an empty spare; the only worker is lost."""
    async with scheduler() as context:
        target = address(context)
        watch = FleetWatch([target], with_detail=True)
        async with in_background(watch.run()), empty_spare(target) as spare:
            await until(lambda: [e.is_waiting for e in watch.empty_spares] == [True], "it waits")
            assert watch.workers == ()
            worker = FakeWorker(a_worker(checkpoint), target)
            async with in_background(worker.registration.run()):
                await until(lambda: len(watch.workers) == 1, "the worker is there")
            yield watch, spare


async def test_it_becomes_what_the_lost_worker_was() -> None:
    async with a_loss("") as (watch, spare):
        await until(lambda: [w.info.worker_id for w in watch.workers] == ["e"], "it serves")
        info = watch.workers[0].info
        assert (info.role, info.scenario, info.model) == (Role.DECODE, "doc", "m")
        assert info.origin.assignment is not None
        assert info.origin.assignment.reason.startswith("takes the place of d0: an empty spare")
        assert 0 < info.origin.load_s < info.origin.start_s
        await until(lambda: not watch.empty_spares, "it is no empty spare any more")
        async with open_channel(f"127.0.0.1:{spare.port}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            found = await health.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
            call = DecodeServiceStub(channel).Decode()
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK, "its services were added"


async def test_a_process_whose_assignment_fails_ends_with_the_reason() -> None:
    async with a_loss("/nowhere") as (watch, spare):
        failure = await asyncio.wait_for(asyncio.shield(spare.failure), 10.0)
        assert "/nowhere" in str(failure)
        assert watch.workers == ()
