"""A scheduler that says what a test tells it to, over real gRPC, and its workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from kvmesh.core.adapters import adapter_id, adapter_name
from kvmesh.core.details import FleetWorker
from kvmesh.core.types import (
    Candidate,
    FinishReason,
    Placement,
    Refusal,
    Role,
    RoutePlan,
    RouteQuery,
    SequenceSpec,
    WorkerLoad,
)
from kvmesh.rpc.channels import bind_server, make_server
from kvmesh.rpc.convert import refusal_to_proto
from kvmesh.rpc.convert_route import (
    fill_route_plan,
    route_query_from_proto,
)
from kvmesh.rpc.convert_worker import fleet_worker_to_proto
from kvmesh.rpc.outbox import parts
from kvmesh.v1 import scheduler_service_pb2_grpc as scheduler_grpc
from kvmesh.v1.scheduler_service_pb2 import (
    AdapterView,
    LoadAdapterResponse,
    RemoveAdapterResponse,
    RouteResponse,
    WatchFleetResponse,
)
from tests.integration.gateway_fake_worker import FakeWorker


@dataclass
class FakeMesh:
    """Scheduler and workers of one test; `output` is what the model says."""

    output: list[int]
    eos: int
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    queries: list[RouteQuery] = field(default_factory=list)
    refuse_routes: Refusal | None = None
    placement: Placement = Placement.DISAGGREGATED
    port: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    hidden: bool = False
    scheduler: grpc.aio.Server | None = None
    fleet_seen: int = 0
    refuse_adapters: str = ""

    def token(self, spec: SequenceSpec, position: int) -> tuple[int, FinishReason | None]:
        """The token at a position, which depends on nothing else."""
        index = position - spec.num_prompt_tokens
        token_id = self.output[index] if index < len(self.output) else self.eos
        if token_id == self.eos and not spec.sampling.ignore_eos:
            return token_id, FinishReason.STOP
        last = index + 1 >= spec.sampling.max_tokens
        return token_id, FinishReason.LENGTH if last else None

    def plan(self, query: RouteQuery) -> RoutePlan:
        able = [
            worker
            for worker in self.workers.values()
            if query.fingerprint in ("", worker.info.layout.model_fingerprint)
        ]
        ranked = sorted(able, key=lambda each: each.info.worker_id in query.avoid)
        sides: dict[Role, list[Candidate]] = {Role.PREFILL: [], Role.DECODE: []}
        for worker in ranked:
            info = worker.info
            candidate = Candidate(info.worker_id, info.incarnation, info.control_endpoint)
            sides[info.role].append(candidate)
        placement = query.placement if query.placement is not Placement.AUTO else self.placement
        decode = tuple(sides[Role.DECODE]) if placement is Placement.DISAGGREGATED else ()
        return RoutePlan(placement, tuple(sides[Role.PREFILL]), decode, True, "test", "fake")

    @property
    def num_open(self) -> int:
        """What workers still hold; zero when all is over."""
        return sum(len(w.running) + len(w.prefilling) + len(w.held) for w in self.workers.values())

    async def stop_scheduler(self) -> None:
        """The scheduler dies."""
        if self.scheduler is not None:
            await self.scheduler.stop(None)

    async def until(self, fact: Callable[[], bool]) -> None:
        """Waits until a fact holds; the test's timeout is the limit."""
        while not fact():
            await asyncio.sleep(0.001)


class FakeScheduler(scheduler_grpc.SchedulerServiceServicer):
    def __init__(self, mesh: FakeMesh) -> None:
        self.mesh = mesh

    async def Route(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(())
        async for joined in requests:
            for message in parts(joined):
                yield self.answer(message)

    def answer(self, message: Any) -> RouteResponse:
        query = route_query_from_proto(message)
        self.mesh.queries.append(query)
        response = RouteResponse(correlation_id=message.correlation_id)
        if self.mesh.refuse_routes is not None:
            response.refusal.CopyFrom(refusal_to_proto(self.mesh.refuse_routes))
        else:
            fill_route_plan(response.plan, self.mesh.plan(query))
        return response

    async def WatchFleet(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            self.mesh.changed.clear()
            workers = [] if self.mesh.hidden else list(self.mesh.workers.values())
            views = [fleet_worker_to_proto(FleetWorker(w.info, w.load)) for w in workers]
            yield WatchFleetResponse(version=1, workers=views)
            self.mesh.fleet_seen += 1
            await self.mesh.changed.wait()

    def RegisterWorker(self, requests: Any, context: Any) -> Any:
        raise AssertionError("no worker registers here")

    async def OrderWorker(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody gives orders here")

    async def ListGroups(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks for groups here")

    async def ApplyGroup(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody sets groups up here")

    async def ListAdapters(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks for adapters here")

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        if self.mesh.refuse_adapters:
            code = grpc.StatusCode.FAILED_PRECONDITION
            await context.abort(code, self.mesh.refuse_adapters)
        self._have_adapter(request.name, request.folder)
        view = AdapterView(name=request.name)
        for name, worker in self.mesh.workers.items():
            view.holders.add(worker_id=name, adapter=worker.info.adapters[-1])
        return LoadAdapterResponse(adapter=view)

    async def RemoveAdapter(self, request: Any, context: Any) -> Any:
        self._have_adapter(request.name, "")
        return RemoveAdapterResponse()

    def _have_adapter(self, name: str, folder: str) -> None:
        """The folder stands for the content; empty: no worker has it any more."""
        for worker in self.mesh.workers.values():
            others = [each for each in worker.info.adapters if adapter_name(each) != name]
            mine = [adapter_id(name, folder)] if folder else []
            worker.info = replace(worker.info, adapters=(*others, *mine))
        self.mesh.changed.set()


@contextlib.asynccontextmanager
async def fake_mesh(output: list[int], eos: int, roles: dict[str, Role]) -> AsyncIterator[FakeMesh]:
    """Runs a scheduler and workers on free ports."""
    mesh = FakeMesh(list(output), eos)
    mesh.go.set()
    server = make_server()
    scheduler_grpc.add_SchedulerServiceServicer_to_server(FakeScheduler(mesh), server)
    mesh.port = bind_server(server, "127.0.0.1", 0)
    for name, role in roles.items():
        mesh.workers[name] = FakeWorker(mesh, name, role)
        await mesh.workers[name].server.start()
    await server.start()
    mesh.scheduler = server
    try:
        yield mesh
    finally:
        await mesh.stop_scheduler()
        for worker in mesh.workers.values():
            await worker.kill()


def draining(load: WorkerLoad) -> WorkerLoad:
    """The same load of a worker that takes nothing new."""
    return replace(load, draining=True)
