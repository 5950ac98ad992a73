"""The workers that are connected to this scheduler: their reports go to the fleet, orders back.

Tests: tests/unit/scheduler/test_registrations.py, tests/integration/test_scheduler.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from kvmesh.core.adapters import AdapterReport
from kvmesh.core.clock import Clock
from kvmesh.core.errors import ProtocolError
from kvmesh.core.turns import is_turn_over
from kvmesh.core.types import Refusal, RefusalReason, RequestId, Role, WorkerId, WorkerInfo
from kvmesh.rpc.convert_adapters import adapter_report_from_proto
from kvmesh.rpc.convert_detail import worker_detail_from_proto
from kvmesh.rpc.convert_empty import empty_spare_from_proto
from kvmesh.rpc.convert_peers import peer_report_from_proto
from kvmesh.rpc.convert_worker import role_to_proto, worker_info_from_proto, worker_load_from_proto
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.stream import incoming
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.scheduler_service_pb2 import (
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    WorkerDrain,
    WorkerRole,
)
from services.scheduler import metrics
from services.scheduler.config import FleetConfig
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet, Membership
from services.scheduler.member import Taken
from services.scheduler.peers import Peers
from services.scheduler.report_pace import ReportPace

log = event_logger(__name__)

Orders = Outbox[RegisterWorkerResponse]
"""The messages to one worker."""


@dataclass(slots=True)
class WorkerStream:
    """One worker's stream, whose messages come over gRPC or over a socket of their own.

    Attributes:
        refusal: why the scheduler ended it; None if the worker did, or its lease.
    """

    orders: Orders
    membership: Membership | None = None
    refusal: Refusal | None = None
    is_over: bool = False


class Registrations:
    """One stream per worker. A newer stream of a worker ends the older one."""

    def __init__(
        self,
        fleet: Fleet,
        feed: FleetFeed,
        config: FleetConfig,
        clock: Clock,
        empties: EmptySpares,
    ) -> None:
        self._empties = empties
        self._fleet = fleet
        self._feed = feed
        self._config = config
        self._clock = clock
        self._orders: dict[WorkerId, tuple[WorkerInfo, Orders]] = {}
        self._pace = ReportPace(config)
        self._closing = False
        self._counted_at = -1
        self.on_registered: Callable[[WorkerInfo], None] = lambda _info: None
        self.peers: Peers | None = None
        """Connects workers to each other; set before the first worker registers."""
        self.on_adapters: Callable[[WorkerInfo, AdapterReport], None] = lambda _info, _report: None
        """Called with a worker and what came of wishes for adapters there."""

    async def follow(
        self, requests: AsyncIterator[RegisterWorkerRequest], stream: WorkerStream
    ) -> None:
        """Reads one worker's messages on gRPC to the end of its stream."""
        try:
            async for request in incoming(requests):
                self.hear(request, stream)
                if stream.is_over:
                    return
        except ProtocolError as error:
            stream.refusal = Refusal(RefusalReason.INVALID, str(error))
        finally:
            self.end(stream)

    def hear(self, request: RegisterWorkerRequest, stream: WorkerStream) -> None:
        """Handles one message of a worker. Ends the stream if the worker left or is refused."""
        if stream.is_over:
            return
        try:
            if not self._heard(request, stream):
                self.end(stream)
        except ProtocolError as error:
            stream.refusal = Refusal(RefusalReason.INVALID, str(error))
            self.end(stream)

    def end(self, stream: WorkerStream) -> None:
        """Removes the worker of a stream that has ended. May be called again."""
        if stream.is_over:
            return
        stream.is_over = True
        self._empties.forget(stream.orders)
        if stream.membership is not None:
            self._remove(stream.membership, cause="stream", reason="its stream ended")
            self._forget_orders(stream.membership.worker_id, stream.orders)
        stream.orders.close()

    def _heard(self, request: RegisterWorkerRequest, stream: WorkerStream) -> bool:
        """Handles one message. Returns False if the stream has to end."""
        kind, membership = request.WhichOneof("report"), stream.membership
        if kind == "info":
            registered = self._register(request, stream.orders)
            if isinstance(registered, Refusal):
                stream.refusal = registered
                return False
            stream.membership = registered
        elif kind == "empty" and membership is None:
            self._empties.note(empty_spare_from_proto(request.empty), stream.orders)
        elif membership is None:
            text = f"{kind} came before the worker's info"
            stream.refusal = Refusal(RefusalReason.INVALID, text)
            return False
        elif kind in ("load", "alive"):
            # False if its lease ended; the worker connects and registers again.
            return self._reported(membership, request)
        elif kind == "detail":
            self._fleet.note_detail(membership, worker_detail_from_proto(request.detail))
            self._note_change()
        elif kind == "adapters":
            info, _ = self._orders[membership.worker_id]
            self.on_adapters(info, adapter_report_from_proto(request.adapters))
        elif kind == "goodbye":
            self._remove(membership, cause="goodbye", reason=request.goodbye.reason)
            return False
        return True

    def _reported(self, membership: Membership, request: RegisterWorkerRequest) -> bool:
        """Handles a load or a confirmation of the last load.

        Returns False if the membership is over.
        """
        now = self._clock.now()
        if not request.HasField("load"):
            return self._fleet.confirm(membership, now)
        load = worker_load_from_proto(request.load)
        prompts, reservations = (
            tuple(map(RequestId, ids)) for ids in (request.prompts, request.reservations)
        )
        if not self._fleet.report(membership, load, now, Taken(prompts, reservations)):
            return False
        if self.peers is not None and request.HasField("peers"):
            info, _ = self._orders[membership.worker_id]
            self.peers.note(info, peer_report_from_proto(request.peers))
        self._note_change()
        return True

    def order(self, worker_id: WorkerId, order: RegisterWorkerResponse) -> bool:
        """Sends a message to a worker. Returns False if the worker is not connected here."""
        if worker_id not in self._orders:
            return False
        self._orders[worker_id][1].put(order)
        return True

    def give_role(self, worker_id: WorkerId, role: Role, reason: str) -> bool:
        """Orders a worker to take a role. Returns False if it is not connected here."""
        given = WorkerRole(role=role_to_proto(role), reason=reason)
        return self.order(worker_id, RegisterWorkerResponse(role=given))

    def give_place(self, worker_id: WorkerId, role: Role, scenario: str, reason: str) -> bool:
        """Orders a worker to take a role in a scenario's group; False as in `give_role`."""
        given = WorkerRole(role=role_to_proto(role), scenario=scenario, reason=reason)
        return self.order(worker_id, RegisterWorkerResponse(role=given))

    def drain(self, worker_id: WorkerId, reason: str) -> bool:
        """Orders a worker to leave the fleet. Returns False if it is not connected here."""
        return self.order(worker_id, RegisterWorkerResponse(drain=WorkerDrain(reason=reason)))

    async def expire_leases(self) -> None:
        """Removes silent workers, until cancelled."""
        pause_s = self._config.lease_s / 6
        while True:
            await self._adapt_pace()
            slept_at = self._clock.now()
            await asyncio.sleep(pause_s)
            now = self._clock.now()
            if now > slept_at + 2 * pause_s:
                continue  # this process stood still itself, so reports of workers are still unread
            for worker_id in self._fleet.expire(now):
                log.warning("worker_lost", worker_id=worker_id, cause="lease")
                metrics.WORKERS_LOST.labels("lease").inc()
            self._note_change()

    async def _adapt_pace(self) -> None:
        """Tells all workers how often to report if the size of the fleet asks for another pace."""
        now = self._clock.now()
        changed = self._pace.adapt(len(self._fleet), now)
        self._fleet.trust(self._pace.patience_s(now))
        if not changed:
            return
        log.info("report_pace", factor=self._pace.factor, num_workers=len(self._fleet))
        message = RegisterWorkerResponse(accepted=self._pace.accepted())
        for number, (_, orders) in enumerate(tuple(self._orders.values())):
            if is_turn_over(number):
                await asyncio.sleep(0)
            orders.put(message)

    def close(self) -> None:
        """Marks that streams end because this service does, not because workers left."""
        self._closing = True

    def _register(self, request: RegisterWorkerRequest, orders: Orders) -> Membership | Refusal:
        info = worker_info_from_proto(request.info)
        # A worker of an older version does not report on peers, and is not held back.
        peers = self.peers if request.HasField("peers") else None
        waits = peers is not None and peers.waits(info)
        registered = self._fleet.register(info, self._clock.now(), waits=waits)
        if isinstance(registered, Refusal):
            return registered
        self._replace_orders(info, orders)
        orders.put(RegisterWorkerResponse(accepted=self._pace.accepted()))
        log.info(
            "worker_registered",
            worker_id=info.worker_id,
            incarnation=info.incarnation,
            role=info.role.value,
            cluster=info.cluster,
            model=info.model,
        )
        if peers is not None:
            peers.arrived(info, peer_report_from_proto(request.peers))
        self._note_change()
        self.on_registered(info)
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
        is_lost = cause != "goodbye"
        if self._closing or not self._fleet.leave(membership, is_lost=is_lost):
            return
        if not is_lost:
            log.info("worker_left", worker_id=membership.worker_id, reason=reason)
        else:
            log.warning("worker_lost", worker_id=membership.worker_id, cause=cause, reason=reason)
            metrics.WORKERS_LOST.labels(cause).inc()
        self._note_change()

    def _note_change(self) -> None:
        if self._fleet.urgent_version != self._counted_at:  # not for each of many reports
            self._counted_at = self._fleet.urgent_version
            metrics.show_workers(self._fleet.count_by_group())
        self._feed.changed()
