"""The scheduler's gRPC service: streams in, calls to `Registrations` and `Router`, streams out.

Tests: tests/integration/test_scheduler.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import grpc

from kvmesh.core.clock import Clock, SystemClock
from kvmesh.core.errors import KvMeshError, ProtocolError
from kvmesh.core.types import (
    Refusal,
    RefusalReason,
    RoutePlan,
    WorkerId,
)
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_fleet import RedisFleetStore
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.rpc.convert import refusal_to_proto
from kvmesh.rpc.convert_detail import worker_order
from kvmesh.rpc.convert_group import wish_from_proto
from kvmesh.rpc.convert_route import (
    fill_route_plan,
    route_query_from_proto,
)
from kvmesh.rpc.direct import DirectListener
from kvmesh.rpc.launcher import RemoteLauncher
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.prefix_feed import PrefixFeed
from kvmesh.rpc.prefix_lookup import PrefixLookup
from kvmesh.rpc.served import DirectWay, serve_questions
from kvmesh.runtime.app import ServiceContext
from kvmesh.sim.profile_file import load_profile
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.scheduler_service_pb2 import (
    ApplyGroupRequest,
    ApplyGroupResponse,
    ListAdaptersRequest,
    ListAdaptersResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    OrderWorkerRequest,
    OrderWorkerResponse,
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    RemoveAdapterRequest,
    RemoveAdapterResponse,
    RouteRequest,
    RouteResponse,
    WatchFleetRequest,
    WatchFleetResponse,
)
from kvmesh.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from services.scheduler import metrics
from services.scheduler.adapters import Adapters, UnknownAdapterError
from services.scheduler.config import PlanningConfig, SchedulerConfig
from services.scheduler.decisions import DecisionLog
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet
from services.scheduler.group_launcher import GroupLauncher
from services.scheduler.groups import Groups, NoLauncherError
from services.scheduler.health import FleetHealth
from services.scheduler.peers import Peers
from services.scheduler.planner import Planner
from services.scheduler.registrations import Orders, Registrations, WorkerStream
from services.scheduler.registry import DurableRegistry
from services.scheduler.role_orders import RoleChanges
from services.scheduler.router import Router
from services.scheduler.scale_orders import ScaleOrders
from services.scheduler.settings import (
    role_changes,
    router_settings,
    scale_changes,
    substitute_changes,
)
from services.scheduler.substitutes import Substitutes

log = event_logger(__name__)

_ABORT_CODES = {
    RefusalReason.STALE: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
}


class SchedulerServicer(SchedulerServiceServicer):
    """Serves workers (registration), gateways (routes) and watchers (fleet views)."""

    def __init__(
        self,
        registrations: Registrations,
        adapters: Adapters,
        feed: FleetFeed,
        router: Router,
        clock: Clock,
        direct: DirectListener,
        *,
        warmup_s: float,
    ) -> None:
        self.groups: Groups | None = None
        self._registrations = registrations
        self._adapters = adapters
        self._feed = feed
        self._router = router
        self._clock = clock
        self._warm_at = clock.now() + warmup_s
        self._direct: DirectWay[RouteResponse] = DirectWay(direct, RouteRequest, iter, at_once=True)
        self._direct_workers: DirectWay[RegisterWorkerResponse] = DirectWay(
            direct, RegisterWorkerRequest, iter
        )

    async def RegisterWorker(
        self,
        request_iterator: AsyncIterator[RegisterWorkerRequest],
        context: grpc.aio.ServicerContext[RegisterWorkerRequest, RegisterWorkerResponse],
    ) -> AsyncIterator[RegisterWorkerResponse]:
        registrations, orders = self._registrations, Orders()
        stream = WorkerStream(orders)
        offer = self._direct_workers.offer(
            lambda request, _: registrations.hear(request, stream), orders
        )
        await context.send_initial_metadata(offer.metadata)
        reader = asyncio.create_task(registrations.follow(request_iterator, stream))
        try:
            async for order in orders:
                yield order
            refusal = stream.refusal
            if offer.failure is not None:
                refusal = Refusal(RefusalReason.INVALID, str(offer.failure))
            if refusal is not None:
                log.warning("registration_refused", message=refusal.message)
                await context.abort(_ABORT_CODES[refusal.reason], refusal.message)
        finally:
            offer.withdraw()
            await _stop(reader)

    async def WatchFleet(
        self,
        request: WatchFleetRequest,
        context: grpc.aio.ServicerContext[WatchFleetRequest, WatchFleetResponse],
    ) -> AsyncIterator[WatchFleetResponse]:
        await context.send_initial_metadata(())
        log.info("watcher_connected", watcher=request.watcher)
        hold_empty_s = max(0.0, self._warm_at - self._clock.now())
        views = self._feed.views(
            hold_empty_s, with_detail=request.with_detail, changes=request.accepts_changes
        )
        async for view in views:
            yield view

    async def OrderWorker(
        self,
        request: OrderWorkerRequest,
        context: grpc.aio.ServicerContext[OrderWorkerRequest, OrderWorkerResponse],
    ) -> OrderWorkerResponse:
        worker_id = WorkerId(request.worker_id)
        order = worker_order(request)
        if order is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no order, or one without a role")
        if not self._registrations.order(worker_id, order):
            text = f"no worker {worker_id!r} is connected to this scheduler"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        log.warning("worker_ordered", worker_id=worker_id, order=order.WhichOneof("order"))
        return OrderWorkerResponse()

    async def ListGroups(
        self,
        request: ListGroupsRequest,
        context: grpc.aio.ServicerContext[ListGroupsRequest, ListGroupsResponse],
    ) -> ListGroupsResponse:
        try:
            return ListGroupsResponse(groups=await self._groups().views())
        except KvMeshError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    async def ApplyGroup(
        self,
        request: ApplyGroupRequest,
        context: grpc.aio.ServicerContext[ApplyGroupRequest, ApplyGroupResponse],
    ) -> ApplyGroupResponse:
        try:
            await self._groups().apply(wish_from_proto(request.wish))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except KvMeshError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return ApplyGroupResponse()

    async def ListAdapters(
        self,
        request: ListAdaptersRequest,
        context: grpc.aio.ServicerContext[ListAdaptersRequest, ListAdaptersResponse],
    ) -> ListAdaptersResponse:
        return ListAdaptersResponse(adapters=self._adapters.views())

    async def LoadAdapter(
        self,
        request: LoadAdapterRequest,
        context: grpc.aio.ServicerContext[LoadAdapterRequest, LoadAdapterResponse],
    ) -> LoadAdapterResponse:
        try:
            loaded = await self._adapters.load(request.model, request.name, request.folder)
        except KvMeshError as error:
            await context.abort(_adapter_code(error), str(error))
        return LoadAdapterResponse(adapter=loaded)

    async def RemoveAdapter(
        self,
        request: RemoveAdapterRequest,
        context: grpc.aio.ServicerContext[RemoveAdapterRequest, RemoveAdapterResponse],
    ) -> RemoveAdapterResponse:
        try:
            await self._adapters.remove(request.model, request.name)
        except KvMeshError as error:
            await context.abort(_adapter_code(error), str(error))
        return RemoveAdapterResponse()

    def _groups(self) -> Groups:
        if self.groups is None:
            text = "this scheduler has no launcher: use `kvmesh up`, or set launcher.target"
            raise NoLauncherError(text)
        return self.groups

    async def Route(
        self,
        request_iterator: AsyncIterator[RouteRequest],
        context: grpc.aio.ServicerContext[RouteRequest, RouteResponse],
    ) -> AsyncIterator[RouteResponse]:
        async for answer in serve_questions(
            request_iterator, context, self._answer, self._router.forget, self._direct
        ):
            yield answer

    async def _answer(self, request: RouteRequest, answers: Outbox[RouteResponse]) -> None:
        outcome: RoutePlan | Refusal
        try:
            query = route_query_from_proto(request)
        except ProtocolError as error:
            outcome = Refusal(RefusalReason.INVALID, str(error))
        else:
            outcome = await self._router.route(query, request.traceparent, answers)
        answer = RouteResponse(correlation_id=request.correlation_id)
        if isinstance(outcome, RoutePlan):
            fill_route_plan(answer.plan, outcome)
        else:
            answer.refusal.CopyFrom(refusal_to_proto(outcome))
        answers.put(answer)


def _adapter_code(error: KvMeshError) -> grpc.StatusCode:
    if isinstance(error, UnknownAdapterError):
        return grpc.StatusCode.NOT_FOUND
    is_away = isinstance(error, StoreUnavailableError)
    return grpc.StatusCode.UNAVAILABLE if is_away else grpc.StatusCode.FAILED_PRECONDITION


async def _stop(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits for its clean-up, ignoring its result."""
    task.cancel()
    await asyncio.wait({task})
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, ProtocolError):  # that one was answered
        log.failure("stream_reader_failed", error)


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The parts of a running scheduler."""

    fleet: Fleet
    prefixes: PrefixLookup | None
    index: PrefixFeed | None
    planner: Planner
    decisions: DecisionLog


async def build(config: SchedulerConfig, context: ServiceContext) -> None:
    """Builds the scheduler into `context`."""
    await start_scheduler(config, context)


async def start_scheduler(config: SchedulerConfig, context: ServiceContext) -> Scheduler:
    """Builds the scheduler and adds it to the server."""
    settings = router_settings(config)
    clock = SystemClock()
    by_tokens = settings.policy.route.first_token is not None
    fleet = Fleet(config.fleet.lease_s, by_tokens=by_tokens)
    feed = FleetFeed(fleet)
    prefixes, index = _prefix_sources(config, context, fleet, clock)
    decisions = DecisionLog(clock, config.routing.decisions)
    context.show("/debug/decisions", decisions.shown)
    store = await _remembered(config, context, fleet, feed, clock)
    owner = f"{context.host}:{context.port}"
    planner = Planner(
        *(fleet, settings.policy, config.planning, decisions, clock),
        changes=role_changes(config.planning),
        store=store,
        owner=owner,
    )
    planner.scale_orders.changes = scale_changes(config)
    planner.scale_orders.by = config.planning.scale_by
    if config.planning.profile:
        planner.profile = load_profile(config.planning.profile)
        log.info("profile_loaded", model=planner.profile.name)
    router = Router(fleet, settings, prefixes, clock, decisions, planner, index)
    await context.direct.start()
    health = FleetHealth(fleet, feed, decisions, clock)
    planner.on_query = health.note_query
    empties = EmptySpares(partial(_note_details, fleet, feed))
    feed.empty_spares = empties.all
    registrations = Registrations(fleet, feed, config.fleet, clock, empties)
    _start_peers(context, registrations, Peers(fleet, feed, registrations.order, decisions, clock))
    kept = store or MemoryFleetStore(clock)
    adapters = Adapters(fleet, registrations, kept, owner=owner)
    context.spawn(adapters.run(), "adapters")
    servicer = SchedulerServicer(
        *(registrations, adapters, feed, router, clock, context.direct),
        warmup_s=config.fleet.warmup_s,
    )
    planner.role_orders.give_role = registrations.give_role
    changes = substitute_changes(config.planning)
    launcher = _launcher(config, context)
    if launcher is not None:
        groups = GroupLauncher(launcher, fleet, empties, registrations.drain)
        servicer.groups = Groups(fleet, feed, groups, kept, decisions, clock, owner=owner)
        await _start_groups(config, context, planner, servicer.groups)
    substitutes = Substitutes(
        fleet, feed, planner, decisions, clock, empties, changes=changes, launcher=launcher
    )
    substitutes.give_place = registrations.give_place
    feed.models = planner.details
    if prefixes is not None:
        feed.kvmanager = lambda: prefixes.connected
    planner.on_details = partial(_note_details, fleet, feed)
    context.spawn(planner.run(), "planner")
    context.on_close(registrations.close)
    context.spawn(registrations.expire_leases(), "expire_leases")
    context.spawn(health.run(), "health")
    context.spawn(substitutes.run(), "substitutes")
    context.add_servicer(add_SchedulerServiceServicer_to_server, servicer)
    return Scheduler(fleet, prefixes, index, planner, decisions)


def _start_peers(context: ServiceContext, registrations: Registrations, peers: Peers) -> None:
    registrations.peers = peers
    context.show("/debug/peers", peers.shown)
    context.spawn(peers.run(), "peers")


async def _start_groups(
    config: SchedulerConfig, context: ServiceContext, planner: Planner, groups: Groups
) -> None:
    await groups.look()  # before the first route
    _carry_out_scale(config.planning, planner.scale_orders, groups)
    context.spawn(groups.run(), "groups")


def _prefix_sources(
    config: SchedulerConfig, context: ServiceContext, fleet: Fleet, clock: Clock
) -> tuple[PrefixLookup | None, PrefixFeed | None]:
    target = config.kvmanager.target
    if not target:
        return None, None
    prefixes = PrefixLookup(target, context.access)
    context.spawn(prefixes.run(), "prefix_lookup")
    index = PrefixFeed(target, clock, context.access)
    fleet.on_life = index.note_life
    metrics.INDEX_BLOCKS.set_function(partial(getattr, index, "num_blocks"))
    context.spawn(index.run(), "prefix_feed")
    return prefixes, index


def _carry_out_scale(planning: PlanningConfig, orders: ScaleOrders, groups: Groups) -> None:
    if orders.changes is RoleChanges.APPLY:
        sizes = range(planning.scale_min, planning.scale_max + 1)
        orders.scale_group = partial(groups.scale, sizes=sizes)


def _note_details(fleet: Fleet, feed: FleetFeed) -> None:
    fleet.note_planned()
    feed.changed()


def _launcher(config: SchedulerConfig, context: ServiceContext) -> RemoteLauncher | None:
    """The launcher, which starts and ends workers; None if there is none."""
    if not config.launcher.target:
        return None
    launcher = RemoteLauncher(config.launcher.target, context.access)
    context.stack.push_async_callback(launcher.close)
    return launcher


async def _remembered(
    config: SchedulerConfig, context: ServiceContext, fleet: Fleet, feed: FleetFeed, clock: Clock
) -> RedisFleetStore | None:
    """Opens the store that outlives this process, and restores the fleet from it."""
    redis = config.redis
    if not redis.url:
        return None
    file = redis.password_file
    client = RedisClient(
        RedisConfig(redis.url, redis.password, redis.key_prefix, password_file=file)
    )
    context.stack.push_async_callback(client.close)
    store = RedisFleetStore(client)
    registry = DurableRegistry(store, fleet, feed, clock, config.fleet.lease_s)
    log.info("fleet_restored", num_workers=await registry.restore())
    context.spawn(registry.run(), "durable_registry")
    return store
