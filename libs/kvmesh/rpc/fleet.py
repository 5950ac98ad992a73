"""A gateway's two connections to the schedulers: a live view of the fleet, and route plans.

Both survive the loss of all schedulers: the view keeps its last state, and `route` fails at once.
Tests: tests/integration/test_scheduler.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

import grpc

from kvmesh.core.details import FleetWorker, ModelDetail
from kvmesh.core.empty_spare import EmptySpare
from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.core.types import Refusal, RoutePlan, RouteQuery
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.convert import refusal_from_proto
from kvmesh.rpc.convert_detail import model_detail_from_proto
from kvmesh.rpc.convert_empty import empty_spare_from_proto
from kvmesh.rpc.convert_route import route_plan_from_proto, route_query_to_proto
from kvmesh.rpc.correlator import Correlator
from kvmesh.rpc.direct import DirectClient
from kvmesh.rpc.fleet_view import FleetMirror
from kvmesh.rpc.outbox import parts
from kvmesh.rpc.stream import UNREACHABLE_AFTER, PeerStream
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.scheduler_service_pb2 import RouteRequest, RouteResponse, WatchFleetRequest
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
_CLOSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

log = event_logger(__name__)

FleetCallback = Callable[[tuple[FleetWorker, ...]], None]


class FleetWatch:
    """The schedulers' view of the fleet, followed at one scheduler at a time.

    Args:
        targets: `host:port` of every scheduler replica, the preferred one first.
        watcher: this process's name in the schedulers' logs.
        with_detail: whether to ask for details that only people need.

    Attributes:
        workers: the last view; kept while no scheduler can be reached.
        refusal: why a scheduler refused this watcher at the last try; empty if it did not.
        fresh: whether a scheduler is connected and `workers` is its view.
        models: the planner's details of models; empty unless details are asked for.
        empty_spares: workers without a model; empty unless details are asked for.
        kvmanager_connected: whether the scheduler reaches its kvmanager; None if it has none, or
            does not report it.
    """

    def __init__(
        self,
        targets: Sequence[str],
        access: MeshAccess = NO_ACCESS,
        watcher: str = "gateway",
        *,
        with_detail: bool = False,
    ) -> None:
        self._targets = tuple(targets)
        self._access = access
        self._watcher = watcher
        self._with_detail = with_detail
        self._callbacks: list[FleetCallback] = []
        self._refusal_callbacks: list[Callable[[], None]] = []
        self.workers: tuple[FleetWorker, ...] = ()
        self.models: tuple[ModelDetail, ...] = ()
        self.empty_spares: tuple[EmptySpare, ...] = ()
        self.kvmanager_connected: bool | None = None
        self.refusal = ""
        self.fresh = False
        self._num_failed = 0

    def on_change(self, callback: FleetCallback) -> None:
        """Adds a callback for each new view. It runs on the event loop and must not block."""
        self._callbacks.append(callback)

    def on_refusal(self, callback: Callable[[], None]) -> None:
        """Adds a callback that is called each time a scheduler refuses this watcher."""
        self._refusal_callbacks.append(callback)

    async def run(self) -> None:
        """Watches until cancelled. When a scheduler is lost, continues with the next one."""
        backoff_s = FIRST_BACKOFF_S
        for target in itertools.cycle(self._targets):
            was_fresh = await self._watch(target)
            backoff_s = FIRST_BACKOFF_S if was_fresh else min(backoff_s * 2, MAX_BACKOFF_S)
            # Jitter, so that gateways do not reconnect at the same time.
            await asyncio.sleep(backoff_s * (0.5 + random.random()))

    async def _watch(self, target: str) -> bool:
        reason = "closed by peer"
        async with open_channel(target, self._access) as channel:
            call = SchedulerServiceStub(channel).WatchFleet(
                WatchFleetRequest(
                    watcher=self._watcher, with_detail=self._with_detail, accepts_changes=True
                )
            )
            mirror = FleetMirror()
            try:
                async for message in call:
                    self.models = tuple(map(model_detail_from_proto, message.models))
                    self.empty_spares = tuple(map(empty_spare_from_proto, message.empty_workers))
                    self.kvmanager_connected = (
                        message.kvmanager_connected
                        if message.HasField("kvmanager_connected")
                        else None
                    )
                    mirror.take(message)
                    self._take(mirror.workers)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if error.code() in _CLOSED:
                    self._refused(error.details() or error.code().name)
            except ProtocolError as error:
                reason = str(error)
            finally:
                was_fresh, self.fresh = self.fresh, False
        if was_fresh:
            log.warning("fleet_view_stale", scheduler=target, reason=reason)
        self._num_failed = 0 if was_fresh else self._num_failed + 1
        if self._num_failed == UNREACHABLE_AFTER:  # logged once, not at each attempt
            log.warning("scheduler_unreachable", scheduler=target, reason=reason)
        return was_fresh

    def _refused(self, reason: str) -> None:
        self.refusal = reason
        for callback in self._refusal_callbacks:
            callback()

    def _take(self, workers: tuple[FleetWorker, ...]) -> None:
        self.workers = workers
        self.refusal = ""
        self.fresh = True
        for callback in self._callbacks:
            callback(workers)


class RouteClient:
    """Asks the schedulers for route plans over one long-lived stream each.

    Args:
        targets: `host:port` of every scheduler replica, the preferred one first.
    """

    def __init__(self, targets: Sequence[str], access: MeshAccess = NO_ACCESS) -> None:
        self._lines = [_RouteLine(target, access) for target in targets]

    @property
    def connected(self) -> bool:
        """Whether any scheduler is connected."""
        return any(line.up.is_set() for line in self._lines)

    async def wait_connected(self, timeout_s: float) -> bool:
        """Waits until a scheduler is connected; False after `timeout_s`."""
        waiting = [asyncio.create_task(line.up.wait()) for line in self._lines]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return self.connected

    async def run(self) -> None:
        """Keeps the streams open until cancelled."""
        async with asyncio.TaskGroup() as lines:
            for line in self._lines:
                lines.create_task(line.run())

    async def route(
        self,
        query: RouteQuery,
        traceparent: str = "",
        timeout_s: float = 1.0,
    ) -> RoutePlan | Refusal:
        """Asks the first connected scheduler, and the next ones if it does not answer.

        Args:
            timeout_s: limit for all schedulers together.

        Raises:
            LostError: no scheduler answered.
        """
        connected = [line for line in self._lines if line.up.is_set()]
        reason = "no scheduler is connected"
        for line in connected:
            try:
                return await line.ask(query, traceparent, timeout_s / len(connected))
            except LostError as error:
                reason = str(error)
        raise LostError(reason)


class _RouteLine:
    """The route stream to one scheduler."""

    def __init__(self, target: str, access: MeshAccess) -> None:
        self._target = target
        self._access = access
        self._answers: Correlator[RouteRequest, RouteResponse] = Correlator(
            lambda response: response.correlation_id
        )
        self._stream: PeerStream[RouteRequest, RouteResponse] | None = None
        self.up = asyncio.Event()

    async def run(self) -> None:
        async with open_channel(self._target, self._access) as channel:
            self._stream = PeerStream(
                f"scheduler@{self._target}",
                SchedulerServiceStub(channel).Route,
                self._receive,
                on_up=self.up.set,
                on_down=self._on_down,
                joins=True,
                direct=DirectClient.of(self._target, RouteResponse, self._access.tls),
            )
            await self._stream.run()

    async def ask(
        self, query: RouteQuery, traceparent: str, timeout_s: float
    ) -> RoutePlan | Refusal:
        assert self._stream is not None, "up, so there is a stream"
        correlation_id = self._answers.next_id()
        question = route_query_to_proto(query, correlation_id, traceparent)
        answer = await self._answers.ask(self._stream, correlation_id, question, timeout_s)
        try:
            if answer.WhichOneof("outcome") == "plan":
                return route_plan_from_proto(answer.plan)
        except ProtocolError as error:
            raise LostError(f"{self._stream.name} sent a plan that cannot be read") from error
        return refusal_from_proto(answer.refusal)

    def _receive(self, message: RouteResponse) -> None:
        for answer in parts(message):
            self._answers.receive(answer)

    def _on_down(self, reason: str) -> None:
        self.up.clear()
        self._answers.fail_all(reason)
