"""Access of commands to the schedulers: flags, a live view of the fleet, operators' orders.

Tests: tests/e2e/test_fleet_command.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc
from google.protobuf.message import Message

from kvmesh.cli.scheduler_flags import DEFAULT_TARGET
from kvmesh.cli.stack_secrets import find_secret
from kvmesh.cli.stack_state import local_stack
from kvmesh.core.details import FleetWorker
from kvmesh.core.empty_spare import EmptySpare
from kvmesh.core.errors import KvMeshError
from kvmesh.core.named_values import listed
from kvmesh.rpc.channels import MeshAccess, PeerTls, open_channel
from kvmesh.rpc.fleet import FleetWatch
from kvmesh.rpc.tls import client_context
from kvmesh.v1.scheduler_service_pb2 import OrderWorkerRequest
from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:  # the name that a stub of an asyncio channel has for type checkers
    from kvmesh.v1.scheduler_service_pb2_grpc import SchedulerServiceAsyncStub

AnswerT = TypeVar("AnswerT")

FIRST_ANSWER_S = 10.0
"""Maximum seconds for a scheduler's first answer; a running scheduler answers sooner."""

_UNSAID = logging.NullHandler()


@dataclass(frozen=True, slots=True)
class SchedulerAccess:
    """Addresses of the schedulers, credentials, and the seconds to wait for an answer."""

    targets: tuple[str, ...]
    mesh: MeshAccess
    timeout_s: float


class NoAnswerError(KvMeshError):
    """No scheduler answered, or the awaited change did not happen in time."""


def scheduler_access(arguments: argparse.Namespace) -> SchedulerAccess:
    """Returns the access that the flags describe.

    Raises:
        ConfigError: a TLS file or the secret's file cannot be used.
    """
    tls = PeerTls(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
    client_context(tls, "--tls")  # names a wrong file; gRPC only reports no answer
    return SchedulerAccess(
        listed(arguments.scheduler) or _local_schedulers(arguments.state_dir) or (DEFAULT_TARGET,),
        MeshAccess(tls, find_secret(arguments.secret_file, arguments.state_dir)),
        arguments.timeout,
    )


def _local_schedulers(state_dir: str) -> tuple[str, ...]:
    """Returns the schedulers of the local stack."""
    members = local_stack(state_dir).get("members", [])
    return tuple(each["address"] for each in members if each["name"].startswith("scheduler"))


class LiveFleet:
    """A live view of the fleet, including details."""

    def __init__(self, watch: FleetWatch, access: SchedulerAccess) -> None:
        self._watch = watch
        self._access = access
        self._changed = asyncio.Event()
        watch.on_change(lambda _workers: self._changed.set())
        watch.on_refusal(self._changed.set)

    @property
    def workers(self) -> tuple[FleetWorker, ...]:
        """All workers, sorted by name."""
        return tuple(sorted(self._watch.workers, key=lambda each: each.info.worker_id))

    @property
    def empty_spares(self) -> tuple[EmptySpare, ...]:
        """Workers without a model, sorted by name."""
        return self._watch.empty_spares

    @property
    def fresh(self) -> bool:
        """Whether a scheduler is connected."""
        return self._watch.fresh

    @property
    def kvmanager_connected(self) -> bool | None:
        """Whether that scheduler reaches its kvmanager; None if it has none or does not report
        it.
        """
        return self._watch.kvmanager_connected

    async def known(self) -> None:
        """Waits until a scheduler has sent the fleet.

        Raises:
            NoAnswerError: none did in time.
        """
        await self._wait(lambda _workers: True, min(self._access.timeout_s, FIRST_ANSWER_S))

    async def until(self, is_true: Callable[[tuple[FleetWorker, ...]], bool], what: str) -> None:
        """Waits until a condition on the fleet holds.

        Raises:
            NoAnswerError: it did not hold in time.
        """
        if not await self._wait(is_true, self._access.timeout_s):
            raise NoAnswerError(
                f"not done after {self._access.timeout_s:g} s: {what}; increase --timeout"
            )

    async def _wait(
        self, is_true: Callable[[tuple[FleetWorker, ...]], bool], timeout_s: float
    ) -> bool:
        """Waits until a condition on the fleet holds; returns False if it did not in time.

        Raises:
            NoAnswerError: no scheduler is connected, or it refuses this process.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.fresh and is_true(self.workers)):
                    if self._watch.refusal:  # waiting longer does not help
                        raise NoAnswerError(self._no_answer())
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            if not self.fresh:
                raise NoAnswerError(self._no_answer()) from error
            return False
        return True

    def _no_answer(self) -> str:
        where = ", ".join(self._access.targets)
        if self._watch.refusal:
            return f"{where} refuses this command: {self._watch.refusal}"
        return (
            f"no scheduler answers at {where}; start a stack with `kvmesh up`, or name one with "
            f"--scheduler{_tls_hint(self._access.mesh.tls)}"
        )

    async def order(self, request: OrderWorkerRequest) -> None:
        """Sends an order to every scheduler; it is enough that one passes it on.

        Raises:
            NoAnswerError: none did; the message is that of the last one.
        """
        failure = ""
        passed_on = False
        for target in self._access.targets:
            async with open_channel(target, self._access.mesh) as channel:
                try:
                    await SchedulerServiceStub(channel).OrderWorker(
                        request, timeout=self._access.timeout_s
                    )
                    passed_on = True
                except grpc.aio.AioRpcError as error:
                    failure = f"{target}: {error.details()}"
        if not passed_on:
            raise NoAnswerError(failure)


def _tls_hint(tls: PeerTls) -> str:
    """Returns a hint that TLS may be the reason why a running scheduler does not answer."""
    if not tls.ca:
        return "; one with TLS wants --tls-ca, --tls-cert and --tls-key"
    return "; see that it uses TLS of this CA and accepts this certificate (server.callers)"


async def ask_scheduler(
    access: SchedulerAccess,
    method: Callable[[SchedulerServiceAsyncStub], Callable[..., Awaitable[AnswerT]]],
    request: Message,
    timeout_s: float,
) -> AnswerT:
    """Returns the answer of the first scheduler that has one; all share their wishes.

    Args:
        method: the stub's method to call, as `lambda stub: stub.ListGroups`.

    Raises:
        NoAnswerError: no scheduler answers, or all refuse.
    """
    failure = "no scheduler is known"
    for target in access.targets:
        async with open_channel(target, access.mesh) as channel:
            try:
                ask = method(SchedulerServiceStub(channel))
                return await ask(request, timeout=timeout_s, wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                failure = f"{target}: {error.details()}"
                if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    failure = f"no scheduler answers at {target}; start a stack with `kvmesh up`"
    raise NoAnswerError(failure)


@asynccontextmanager
async def live_fleet(access: SchedulerAccess, watcher: str) -> AsyncIterator[LiveFleet]:
    """Provides a live view of the fleet, complete from the start.

    Raises:
        NoAnswerError: no scheduler answered in time.
    """
    # Commands report these events themselves; without a handler Python would print the log's.
    logging.getLogger("kvmesh.rpc").addHandler(_UNSAID)
    watch = FleetWatch(access.targets, access.mesh, watcher, with_detail=True)
    view = LiveFleet(watch, access)
    task = asyncio.create_task(watch.run(), name="fleet watch")
    try:
        await view.known()
        yield view
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
