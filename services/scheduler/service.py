"""The scheduler's gRPC service: streams in, calls to `Fleet` and `Router`, streams out.

Tests: tests/integration/test_scheduler.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from kvmesh.core.clock import Clock, SystemClock
from kvmesh.core.errors import ProtocolError
from kvmesh.core.types import (
    Refusal,
    RefusalReason,
    Role,
    RoutePlan,
    RouteQuery,
    WorkerId,
    WorkerInfo,
)
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_fleet import RedisFleetStore
from kvmesh.policy.plans_ahead import PlansAhead, Wish
from kvmesh.rpc.convert import refusal_to_proto
from kvmesh.rpc.convert_detail import worker_detail_from_proto, worker_order
from kvmesh.rpc.convert_route import (
    fill_plans_ahead,
    fill_route_plan,
    route_query_from_proto,
    wish_from_proto,
)
from kvmesh.rpc.convert_worker import role_to_proto, worker_info_from_proto, worker_load_from_proto
from kvmesh.rpc.direct import DirectListener
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.prefix_lookup import PrefixLookup
from kvmesh.rpc.served import DirectWay, serve_questions
from kvmesh.rpc.stream import incoming
from kvmesh.runtime.app import ServiceContext
from kvmesh.sim.profile_file import load_profile
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.scheduler_service_pb2 import (
    OrderWorkerRequest,
    OrderWorkerResponse,
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    RouteRequest,
    RouteResponse,
    WatchFleetRequest,
    WatchFleetResponse,
    WorkerAccepted,
    WorkerDrain,
    WorkerRole,
)
from kvmesh.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from services.scheduler import metrics
from services.scheduler.config import FleetConfig, SchedulerConfig
from services.scheduler.decisions import DecisionLog
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet, Membership
from services.scheduler.planner import Planner
from services.scheduler.registry import DurableRegistry
from services.scheduler.router import Router
from services.scheduler.settings import role_changes, router_settings

log = event_logger(__name__)

_ABORT_CODES = {
    RefusalReason.STALE: grpc.StatusCode.FAILED_PRECONDITION,
    RefusalReason.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
}

Orders = Outbox[RegisterWorkerResponse]


class SchedulerServicer(SchedulerServiceServicer):
    """Serves workers (registration), gateways (routes) and watchers (fleet views)."""

    def __init__(
        self,
        fleet: Fleet,
        feed: FleetFeed,
        router: Router,
        config: FleetConfig,
        clock: Clock,
        direct: DirectListener,
    ) -> None:
        self._fleet = fleet
        self._feed = feed
        self._router = router
        self._config = config
        self._clock = clock
        self._warm_at = clock.now() + config.warmup_s
        self._orders: dict[WorkerId, tuple[WorkerInfo, Orders]] = {}
        self._closing = False
        self._direct: DirectWay[RouteResponse] = DirectWay(direct, RouteRequest, iter, at_once=True)

    async def RegisterWorker(
        self,
        request_iterator: AsyncIterator[RegisterWorkerRequest],
        context: grpc.aio.ServicerContext[RegisterWorkerRequest, RegisterWorkerResponse],
    ) -> AsyncIterator[RegisterWorkerResponse]:
        await context.send_initial_metadata(())
        orders: Orders = Outbox()
        reader = asyncio.create_task(self._follow_worker(request_iterator, orders))
        try:
            async for order in orders:
                yield order
            refusal = reader.result() if reader.done() else None
            if refusal is not None:
                log.warning("registration_refused", message=refusal.message)
                await context.abort(_ABORT_CODES[refusal.reason], refusal.message)
        finally:
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
        if worker_id not in self._orders:
            text = f"no worker {worker_id!r} is connected to this scheduler"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        self._orders[worker_id][1].put(order)
        log.warning("worker_ordered", worker_id=worker_id, order=order.WhichOneof("order"))
        return OrderWorkerResponse()

    async def Route(
        self,
        request_iterator: AsyncIterator[RouteRequest],
        context: grpc.aio.ServicerContext[RouteRequest, RouteResponse],
    ) -> AsyncIterator[RouteResponse]:
        async for answer in serve_questions(
            request_iterator, context, self._answer, self._router.forget, self._direct
        ):
            yield answer

    async def expire_leases(self) -> None:
        """Removes silent workers, until cancelled."""
        while True:
            await asyncio.sleep(self._config.lease_s / 6)
            for worker_id in self._fleet.expire(self._clock.now()):
                log.warning("worker_lost", worker_id=worker_id, cause="lease")
                metrics.WORKERS_LOST.labels("lease").inc()
            self._note_change()

    def give_role(self, worker_id: WorkerId, role: Role, reason: str) -> bool:
        """Orders a worker to take a role; False if it is not connected to this scheduler."""
        if worker_id not in self._orders:
            return False
        order = WorkerRole(role=role_to_proto(role), reason=reason)
        self._orders[worker_id][1].put(RegisterWorkerResponse(role=order))
        return True

    def close(self) -> None:
        """From here on, streams end because this service does, not because workers left."""
        self._closing = True

    async def _answer(self, request: RouteRequest, answers: Outbox[RouteResponse]) -> None:
        outcome: RoutePlan | Refusal
        wish: Wish | None = None
        try:
            query = route_query_from_proto(request)
            wish = wish_from_proto(request)
        except ProtocolError as error:
            outcome = Refusal(RefusalReason.INVALID, str(error))
        else:
            outcome = await self._router.route(query, request.traceparent, answers)
        correlation_id = request.correlation_id
        answer = RouteResponse(correlation_id=correlation_id)
        if isinstance(outcome, RoutePlan):
            fill_route_plan(answer.plan, outcome)
        else:
            answer.refusal.CopyFrom(refusal_to_proto(outcome))
        answers.put(answer)
        if wish is not None:
            self._router.note_used(query, wish)
            if wish.count and isinstance(outcome, RoutePlan):
                # Later, so that the answer leaves first: who asked waits for nothing else.
                loop = asyncio.get_running_loop()
                loop.call_soon(self._plan_ahead, correlation_id, query, wish, 0, answers)

    def _plan_ahead(
        self,
        correlation_id: int,
        query: RouteQuery,
        wish: Wish,
        begin: int,
        answers: Outbox[RouteResponse],
    ) -> None:
        """Makes and sends the plans from number `begin` on, a batch in each turn of the loop."""
        plans = self._router.plan_ahead(query, wish, begin)
        if not plans:
            return
        answer = RouteResponse(correlation_id=correlation_id)
        fill_plans_ahead(answer.ahead, PlansAhead(wish.kind, plans))
        answers.put(answer)
        loop, begin = asyncio.get_running_loop(), begin + len(plans)
        loop.call_soon(self._plan_ahead, correlation_id, query, wish, begin, answers)

    async def _follow_worker(
        self, requests: AsyncIterator[RegisterWorkerRequest], orders: Orders
    ) -> Refusal | None:
        """Reads one worker's stream to its end; a refusal says why the end came from here."""
        membership: Membership | None = None
        try:
            async for request in incoming(requests):
                kind = request.WhichOneof("report")
                if kind == "info":
                    registered = self._register(worker_info_from_proto(request.info), orders)
                    if isinstance(registered, Refusal):
                        return registered
                    membership = registered
                elif membership is None:
                    return Refusal(RefusalReason.INVALID, f"{kind} came before the worker's info")
                elif kind == "load":
                    load = worker_load_from_proto(request.load)
                    if not self._fleet.report(membership, load, self._clock.now()):
                        return None  # its lease ended; it connects and registers again
                    self._note_change()
                elif kind == "detail":
                    self._fleet.note_detail(membership, worker_detail_from_proto(request.detail))
                    self._note_change()
                elif kind == "goodbye":
                    self._remove(membership, cause="goodbye", reason=request.goodbye.reason)
                    return None
        except ProtocolError as error:
            return Refusal(RefusalReason.INVALID, str(error))
        finally:
            if membership is not None:
                self._remove(membership, cause="stream", reason="its stream ended")
                self._forget_orders(membership.worker_id, orders)
            orders.close()
        return None

    def _register(self, info: WorkerInfo, orders: Orders) -> Membership | Refusal:
        registered = self._fleet.register(info, self._clock.now())
        if isinstance(registered, Refusal):
            return registered
        self._replace_orders(info, orders)
        accepted = WorkerAccepted(
            report_interval_ms=round(self._config.report_interval_s * 1000),
            lease_ms=round(self._config.lease_s * 1000),
        )
        orders.put(RegisterWorkerResponse(accepted=accepted))
        log.info(
            "worker_registered",
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            role=info.role.value,
            cluster=info.cluster,
            model=info.model,
        )
        self._note_change()
        return registered

    def _replace_orders(self, info: WorkerInfo, orders: Orders) -> None:
        before = self._orders.get(info.worker_id)
        self._orders[info.worker_id] = (info, orders)
        if before is None or before[1] is orders:
            return
        older, its_orders = before
        if older.incarnation < info.incarnation:
            reason = f"replaced by incarnation {info.incarnation}"
            its_orders.put(RegisterWorkerResponse(drain=WorkerDrain(reason=reason)))
        its_orders.close()

    def _forget_orders(self, worker_id: WorkerId, orders: Orders) -> None:
        if worker_id in self._orders and self._orders[worker_id][1] is orders:
            del self._orders[worker_id]

    def _remove(self, membership: Membership, cause: str, reason: str) -> None:
        if self._closing or not self._fleet.leave(membership):
            return
        if cause == "goodbye":
            log.info("worker_left", worker_id=membership.worker_id, reason=reason)
        else:
            log.warning("worker_lost", worker_id=membership.worker_id, cause=cause, reason=reason)
            metrics.WORKERS_LOST.labels(cause).inc()
        self._note_change()

    def _note_change(self) -> None:
        for role, count in self._fleet.count_by_role().items():
            metrics.WORKERS.labels(role.value).set(count)
        self._feed.changed()


async def _stop(task: asyncio.Task[Refusal | None] | asyncio.Task[None]) -> None:
    """Ends a task and waits for its clean-up, without taking on its outcome."""
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
    planner: Planner
    decisions: DecisionLog


async def build(config: SchedulerConfig, context: ServiceContext) -> None:
    """Builds the scheduler into `context`."""
    await start_scheduler(config, context)


async def start_scheduler(config: SchedulerConfig, context: ServiceContext) -> Scheduler:
    """Puts the scheduler together and adds it to the server."""
    settings = router_settings(config)
    clock = SystemClock()
    by_tokens = settings.policy.route.first_token is not None
    fleet = Fleet(config.fleet.lease_s, by_tokens=by_tokens)
    feed = FleetFeed(fleet)
    prefixes = None
    if config.kvmanager.target:
        prefixes = PrefixLookup(config.kvmanager.target, config.server.tls)
        context.spawn(prefixes.run(), "prefix_lookup")
    decisions = DecisionLog(clock, config.routing.decisions)
    context.admin.route("GET", "/debug/decisions", decisions.serve)
    store: RedisFleetStore | None = None
    if config.redis.url:
        redis = config.redis
        client = RedisClient(RedisConfig(redis.url, redis.password, redis.key_prefix))
        context.stack.push_async_callback(client.close)
        store = RedisFleetStore(client)
        registry = DurableRegistry(store, fleet, feed, clock, config.fleet.lease_s)
        log.info("fleet_restored", num_workers=await registry.restore())
        context.spawn(registry.run(), "durable_registry")
    planner = Planner(
        fleet,
        settings.policy,
        config.planning,
        decisions,
        clock,
        changes=role_changes(config.planning),
        store=store,
        owner=f"{context.host}:{context.port}",
    )
    if config.planning.profile:
        planner.profile = load_profile(config.planning.profile)
        log.info("profile_loaded", model=planner.profile.name)
    router = Router(fleet, settings, prefixes, clock, decisions, planner)
    await context.direct.start()
    servicer = SchedulerServicer(fleet, feed, router, config.fleet, clock, context.direct)
    planner.give_role = servicer.give_role
    feed.models = planner.details
    if prefixes is not None:
        feed.kvmanager = lambda: prefixes.connected

    def note_details() -> None:
        fleet.note_planned()
        feed.changed()

    planner.on_details = note_details
    context.spawn(planner.run(), "planner")
    context.on_close(servicer.close)
    context.spawn(servicer.expire_leases(), "expire_leases")
    context.add_servicer(add_SchedulerServiceServicer_to_server, servicer)
    return Scheduler(fleet, prefixes, planner, decisions)
