"""A scheduler with fake workers, as a gateway sees it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import RoutePlan, RouteQuery, WorkerInfo, WorkerLoad
from kvmesh.rpc.fleet import FleetWatch, RouteClient
from kvmesh.rpc.registration import PeerHooks, SchedulerRegistration
from kvmesh.runtime.app import ServerConfig, ServiceContext, serving
from services.scheduler.config import FleetConfig, SchedulerConfig
from services.scheduler.service import build
from tests.unit.policy.fleet_examples import query

SOON_S = 5.0
EXAMPLE = SchedulerConfig(
    fleet=FleetConfig(lease_s=1.0, report_interval_s=0.1, warmup_s=0.0),
)


@asynccontextmanager
async def scheduler(
    config: SchedulerConfig = EXAMPLE, port: int = 0
) -> AsyncIterator[ServiceContext]:
    config = dataclasses.replace(config, server=ServerConfig(port=port))
    async with serving("scheduler", config, build) as context:
        yield context


def address(context: ServiceContext) -> str:
    return f"127.0.0.1:{context.port}"


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


class FakeWorker:
    """A worker's registration with a load that the test sets."""

    def __init__(self, info: WorkerInfo, *targets: str, peers: PeerHooks | None = None) -> None:
        self.load = WorkerLoad(blocks_free=info.num_blocks)
        self.drains: list[str] = []
        self.registration = SchedulerRegistration(
            targets, info, lambda: self.load, self.drains.append, peers=peers
        )

    def report(self, **changes: Any) -> None:
        self.load = dataclasses.replace(self.load, **changes)
        self.registration.notify()


class Mesh:
    """A gateway's view of a scheduler, with fake workers."""

    def __init__(self, stack: AsyncExitStack, *targets: str) -> None:
        self._stack = stack
        self._targets = targets
        self.watch = FleetWatch(targets)
        self.routes = RouteClient(targets)
        self._changed = asyncio.Event()
        self.watch.on_change(lambda _: self._changed.set())

    async def start(self) -> None:
        await self._stack.enter_async_context(in_background(self.watch.run()))
        await self._stack.enter_async_context(in_background(self.routes.run()))
        assert await self.routes.wait_connected(SOON_S)

    async def join(self, info: WorkerInfo) -> tuple[FakeWorker, asyncio.Task[None]]:
        worker = FakeWorker(info, *self._targets)
        running = await self._stack.enter_async_context(in_background(worker.registration.run()))
        assert await worker.registration.wait_registered(SOON_S)
        return worker, running

    async def until(self, is_true: Callable[[tuple[FleetWorker, ...]], bool]) -> None:
        """Waits for a fact about the watched fleet."""
        async with asyncio.timeout(SOON_S):
            while not is_true(self.watch.workers):
                self._changed.clear()
                await self._changed.wait()

    async def until_names(self, *names: str) -> None:
        await self.until(lambda seen: {each.info.worker_id for each in seen} == set(names))

    async def plan(self, asked: RouteQuery | None = None) -> RoutePlan:
        outcome = await self.routes.route(asked or query())
        assert isinstance(outcome, RoutePlan), outcome
        return outcome


@asynccontextmanager
async def mesh(*targets: str) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        made = Mesh(stack, *targets)
        await made.start()
        yield made


def first_names(plan: RoutePlan) -> list[str]:
    return [side[0].worker_id for side in (plan.prefill, plan.decode) if side]
