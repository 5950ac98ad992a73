"""A worker's registration with every scheduler: first its info, then its load, for all its life.

Tests: tests/integration/test_scheduler.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from kvmesh.core.adapters import AdapterReport, AdapterWishes
from kvmesh.core.details import WorkerDetail
from kvmesh.core.errors import ConfigError
from kvmesh.core.peers import Peer, PeerReport
from kvmesh.core.types import RequestId, Role, WorkerInfo, WorkerLoad
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.convert_adapters import adapter_report_to_proto, adapter_wishes_from_proto
from kvmesh.rpc.convert_detail import worker_detail_to_proto
from kvmesh.rpc.convert_peers import peer_report_to_proto, peers_from_proto
from kvmesh.rpc.convert_worker import role_from_proto, worker_info_to_proto, worker_load_to_proto
from kvmesh.rpc.direct import DirectClient
from kvmesh.rpc.stream import PeerStream
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.scheduler_service_pb2 import (
    RegisterWorkerRequest,
    RegisterWorkerResponse,
    WorkerAlive,
    WorkerGoodbye,
)
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

FIRST_INTERVAL_S = 0.5
"""Seconds between reports until a scheduler names its own interval."""

MIN_GAP_S = 0.02
"""Seconds in which changes share one report."""

FOLLOW_UP_S = 0.1
"""Seconds after which a change is reported again.

A scheduler counts a route whose request no worker names as load until a report that comes some time
after it. Without the second report, such a route would count for a whole interval.
"""

MAX_TAKEN = 1024
"""Maximum number of accepted requests that a report names; without a connection, older ones are
dropped."""

DETAIL_INTERVAL_S = 1.0
"""Minimum seconds between two reports of details for people."""

REFUSED_PAUSE_S = 1.0
"""Seconds to wait after a scheduler refused the registration.

It knows a newer incarnation of this worker, or finds the worker's info wrong; neither changes
within milliseconds.
"""

_INVALID = grpc.StatusCode.INVALID_ARGUMENT.name
_REFUSED = (grpc.StatusCode.FAILED_PRECONDITION.name, _INVALID)

RegistrationStream = PeerStream[RegisterWorkerRequest, RegisterWorkerResponse]

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class OperatorHooks:
    """A worker's details for people, and its handlers for operators' orders.

    Attributes:
        detail: returns the details for people; called about once a second.
        on_cordon: called with whether to accept no new work, and the reason.
        on_role: called with the new role, the scenario whose group to join (None: stay), and the
            reason.
        on_adapters: called with the LoRA adapters that the worker is to have.
    """

    detail: Callable[[], WorkerDetail]
    on_cordon: Callable[[bool, str], None]
    on_role: Callable[[Role, str | None, str], None]
    on_adapters: Callable[[AdapterWishes], None]


@dataclass(frozen=True, slots=True)
class PeerHooks:
    """A worker's connections to its peers.

    Attributes:
        on_peers: called with a scheduler and the peers that it names.
        report: returns the results so far; called for each report of the load.
    """

    on_peers: Callable[[str, tuple[Peer, ...]], None]
    report: Callable[[], PeerReport]


class SchedulerRegistration:
    """Keeps a worker registered with all schedulers, over restarts and broken connections.

    Args:
        targets: `host:port` of every scheduler replica.
        load: returns the worker's load; called for each report.
        on_drain: called with a reason when a scheduler orders the worker to drain.
        operator: without it the worker shows no details and ignores other orders.
        peers: without it schedulers do not wait for its connections to peers.
    """

    def __init__(
        self,
        targets: Sequence[str],
        info: WorkerInfo,
        load: Callable[[], WorkerLoad],
        on_drain: Callable[[str], None],
        access: MeshAccess = NO_ACCESS,
        *,
        operator: OperatorHooks | None = None,
        peers: PeerHooks | None = None,
    ) -> None:
        self._links = [
            _Link(target, info, load, on_drain, access, operator, peers) for target in targets
        ]

    @property
    def num_registered(self) -> int:
        """Number of schedulers that have accepted the worker and are connected."""
        return sum(link.registered.is_set() for link in self._links)

    async def wait_registered(self, timeout_s: float) -> bool:
        """Waits until one scheduler has accepted the worker; False after `timeout_s`."""
        waiting = [asyncio.create_task(link.registered.wait()) for link in self._links]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        return self.num_registered > 0

    async def run(self) -> None:
        """Registers and reports until cancelled or until `goodbye`.

        Raises:
            ConfigError: a scheduler reports that this worker can never join the fleet, and no
                scheduler has ever accepted it.
        """
        try:
            async with asyncio.TaskGroup() as links:
                for link in self._links:
                    links.create_task(link.run())
        except ExceptionGroup as group:
            refusals = group.subgroup(ConfigError)
            if refusals is None:
                raise
            raise ConfigError(str(refusals.exceptions[0])) from None

    def notify(self) -> None:
        """Makes the next report come soon. Call it when the load changed."""
        for link in self._links:
            link.wake()

    def took_prompt(self, request_id: RequestId) -> None:
        """Notes that the worker accepted a request's prompt; the next load shows it."""
        for link in self._links:
            link.prompts.append(request_id)
        self.notify()

    def took_reservation(self, request_id: RequestId) -> None:
        """Notes that the worker reserved blocks for a request; the next load shows it."""
        for link in self._links:
            link.reservations.append(request_id)
        self.notify()

    def update(self, info: WorkerInfo) -> None:
        """Registers the same incarnation of the worker again with other info, at all schedulers."""
        for link in self._links:
            link.update(info)

    def report_adapters(self, report: AdapterReport) -> None:
        """Reports the results of adapter wishes to all schedulers, after `update` if it changed."""
        for link in self._links:
            link.report_adapters(report)

    async def goodbye(self, reason: str, timeout_s: float = 2.0) -> None:
        """Leaves all schedulers with a goodbye and does not come back.

        Returns when the schedulers have removed the worker, or after `timeout_s`.
        """
        await asyncio.gather(*(link.leave(reason, timeout_s) for link in self._links))


class _Link:
    """The registration with one scheduler."""

    def __init__(
        self,
        target: str,
        info: WorkerInfo,
        load: Callable[[], WorkerLoad],
        on_drain: Callable[[str], None],
        access: MeshAccess,
        operator: OperatorHooks | None,
        peers: PeerHooks | None,
    ) -> None:
        self.registered = asyncio.Event()
        self._target = target
        self._info = worker_info_to_proto(info)
        self._load = load
        self._on_drain = on_drain
        self._access = access
        self._operator = operator
        self._peers = peers
        self._told_peers: PeerReport | None = None
        self._detail_due_at = 0.0
        self._interval_s = FIRST_INTERVAL_S
        self._alive_interval_s = 0.0
        self._told_load: WorkerLoad | None = None
        self._told_detail: WorkerDetail | None = None
        self._told_at = 0.0
        self._wake = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._refused = False
        self._invalid = ""
        self._was_registered = False
        self._leaving = False
        self._over = False
        self._stream: RegistrationStream | None = None
        self.prompts = deque[RequestId](maxlen=MAX_TAKEN)
        self.reservations = deque[RequestId](maxlen=MAX_TAKEN)

    def wake(self) -> None:
        self._wake.set()

    def update(self, info: WorkerInfo) -> None:
        self._info = worker_info_to_proto(info)
        self._detail_due_at = 0.0
        if self._stream is not None and self._stream.connected and not self._leaving:
            self._send_info(self._stream)

    def report_adapters(self, report: AdapterReport) -> None:
        if self._stream is not None and self._stream.connected and not self._leaving:
            message = adapter_report_to_proto(report)
            self._stream.send(RegisterWorkerRequest(adapters=message))

    async def run(self) -> None:
        async with open_channel(self._target, self._access) as channel:
            stub = SchedulerServiceStub(channel)
            while not self._over:
                self._refused = False
                self._stream = PeerStream(
                    f"scheduler@{self._target}",
                    stub.RegisterWorker,
                    self._on_message,
                    on_up=self._on_up,
                    on_down=self._on_down,
                    direct=DirectClient.of(self._target, RegisterWorkerResponse, self._access.tls),
                )
                async with asyncio.TaskGroup() as tasks:
                    connection = tasks.create_task(self._stream.run())
                    await self._report(self._stream)
                    connection.cancel()
                if self._refused:
                    if self._invalid and not self._was_registered:
                        raise ConfigError(f"the scheduler refuses this worker: {self._invalid}")
                    await asyncio.sleep(REFUSED_PAUSE_S)

    async def leave(self, reason: str, timeout_s: float) -> None:
        self._leaving = True
        if self._stream is not None and self._stream.connected:
            self._stream.send(RegisterWorkerRequest(goodbye=WorkerGoodbye(reason=reason)))
            # The scheduler ends the stream after it has removed the worker.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._down.wait()
        self._over = True
        self._wake.set()

    async def _report(self, stream: RegistrationStream) -> None:
        changed = follows_up = False
        now = asyncio.get_running_loop().time
        while not self._over and not self._refused:
            if stream.connected and not self._leaving:
                self._send_news(stream, must_tell=changed or follows_up)
                self._send_detail(stream)
            told_at = now()
            follows_up = changed
            pause_s = min(FOLLOW_UP_S, self._interval_s) if follows_up else self._interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            # The wait may time out although the event was set in the same moment.
            changed = self._wake.is_set()
            if changed:  # one timer for an idle worker: only a change has to wait for others
                await asyncio.sleep(max(told_at + MIN_GAP_S - now(), 0.0))
            self._wake.clear()

    def _send_news(self, stream: RegistrationStream, *, must_tell: bool) -> None:
        """Reports the load. If the load is unchanged, only confirms that the worker is alive."""
        now = asyncio.get_running_loop().time()
        if must_tell or not self._alive_interval_s or self._load() != self._told_load:
            self._send_load(stream)
        elif now - self._told_at >= self._alive_interval_s - self._interval_s / 2:
            self._told_at = now
            stream.send(RegisterWorkerRequest(alive=WorkerAlive()))

    def _send_load(self, stream: RegistrationStream) -> None:
        self._told_load = self._load()
        self._told_at = asyncio.get_running_loop().time()
        load = worker_load_to_proto(self._told_load)
        message = RegisterWorkerRequest(
            load=load, prompts=self.prompts, reservations=self.reservations
        )
        self.prompts.clear()
        self.reservations.clear()
        if self._peers is not None and (report := self._peers.report()) != self._told_peers:
            self._told_peers = report
            message.peers.CopyFrom(peer_report_to_proto(report))
        stream.send(message)

    def _send_info(self, stream: RegistrationStream) -> None:
        message = RegisterWorkerRequest(info=self._info)
        if self._peers is not None:
            self._told_peers = self._peers.report()
            message.peers.CopyFrom(peer_report_to_proto(self._told_peers))
        stream.send(message)
        self._send_load(stream)

    def _send_detail(self, stream: RegistrationStream) -> None:
        now = asyncio.get_running_loop().time()
        if self._operator is not None and now >= self._detail_due_at:
            self._detail_due_at = now + DETAIL_INTERVAL_S
            detail = self._operator.detail()
            if detail != self._told_detail:
                self._told_detail = detail
                stream.send(RegisterWorkerRequest(detail=worker_detail_to_proto(detail)))

    def _on_up(self) -> None:
        assert self._stream is not None
        self._down.clear()
        if self._leaving:
            return
        self._detail_due_at = 0.0
        self._told_detail = None  # a scheduler that has just started has no details
        self._send_info(self._stream)

    def _on_down(self, reason: str) -> None:
        self.registered.clear()
        self._down.set()
        if reason.startswith(_REFUSED):
            log.warning("registration_refused", scheduler=self._target, reason=reason)
            self._refused = True
            is_invalid = reason.startswith(_INVALID)
            self._invalid = reason.removeprefix(f"{_INVALID}: ") if is_invalid else ""
            self._wake.set()

    def _on_message(self, message: RegisterWorkerResponse) -> None:
        match message.WhichOneof("order"):
            case "accepted":
                self._interval_s = message.accepted.report_interval_ms / 1000
                self._alive_interval_s = message.accepted.alive_interval_ms / 1000
                self.registered.set()
                self._was_registered = True
                log.info("registered", scheduler=self._target)
            case "drain":
                log.warning("drain_ordered", scheduler=self._target, reason=message.drain.reason)
                self._on_drain(message.drain.reason)
            case "cordon" if self._operator is not None:
                self._operator.on_cordon(message.cordon.cordoned, message.cordon.reason)
                self._detail_due_at = 0.0
                self._wake.set()
            case "role" if self._operator is not None:
                role = role_from_proto(message.role.role)
                if role is not None:
                    told = message.role
                    scenario = told.scenario if told.HasField("scenario") else None
                    self._operator.on_role(role, scenario, told.reason)
            case "peers" if self._peers is not None:
                self._peers.on_peers(self._target, peers_from_proto(message.peers))
                # A scheduler that names peers again has not heard of them.
                self._told_peers = None
                self.wake()
            case "adapters" if self._operator is not None:
                self._operator.on_adapters(adapter_wishes_from_proto(message.adapters))
            case _:
                pass  # an order of a newer scheduler
