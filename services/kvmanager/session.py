"""One worker's Publish stream: applies its messages and notices if the index is not exact.

A session is either following (it applies events in sequence) or awaiting (it ordered a snapshot and
ignores events until the last part has arrived). A failed store call marks the session as `lost`;
the guard's recovery then orders a snapshot. Tests: tests/unit/kvmanager/test_session.py.
"""

from __future__ import annotations

import asyncio

from kvmesh.core.errors import ProtocolError
from kvmesh.core.slots import Publisher, Slot
from kvmesh.core.types import BLOCK_HASH_BYTES, WorkerId
from kvmesh.metadata.store import ApplyResult, StoreUnavailableError
from kvmesh.rpc.outbox import Outbox
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import kv_manager_service_pb2 as pb
from services.kvmanager import metrics
from services.kvmanager.guard import StoreGuard
from services.kvmanager.renewals import Renewals

log = event_logger(__name__)

PublishOutbox = Outbox[pb.PublishResponse]


def publisher_from_hello(message: pb.PublishRequest) -> Publisher:
    """Reads the first message of a stream.

    Raises:
        ProtocolError: it is not a hello, or a field is empty.
    """
    hello = message.hello
    if message.WhichOneof("message") != "hello":
        raise ProtocolError("no_hello", "the first message of a Publish stream must be a hello")
    if not hello.worker_id or not hello.namespace:
        raise ProtocolError("bad_hello", "worker_id and namespace must not be empty")
    return Publisher(WorkerId(hello.worker_id), hello.incarnation, hello.cluster, hello.namespace)


def check_hashes(*blobs: bytes) -> None:
    """Raises ProtocolError if joined hashes have an incomplete hash."""
    for blob in blobs:
        if len(blob) % BLOCK_HASH_BYTES:
            raise ProtocolError(
                "hash_length", f"{len(blob)} bytes of {BLOCK_HASH_BYTES}-byte hashes"
            )


class PublisherSession:
    """Follows one publisher: call `open` first, then `handle` for each message.

    Args:
        writes: limits the number of sessions that change the store at once.
        renewals: renews the leases of all sessions.
    """

    def __init__(
        self,
        publisher: Publisher,
        guard: StoreGuard,
        outbox: PublishOutbox,
        writes: asyncio.Semaphore,
        renewals: Renewals,
    ) -> None:
        self.publisher = publisher
        self._guard = guard
        self._outbox = outbox
        self._writes = writes
        self._renewals = renewals
        # Messages and the store's recovery come from different tasks.
        self._turn = asyncio.Lock()
        self._slot: Slot | None = None
        self._sequence = 0
        self._loading: Slot | None = None
        self._awaiting = False
        self._lost = False

    async def open(self) -> None:
        """Registers the publisher's slot. Without the store, waits for its recovery."""
        async with self._turn, self._writes:
            try:
                registration = await self._guard.call(lambda s: s.register(self.publisher))
            except StoreUnavailableError:
                self._lost = True
                return
            self._slot, self._sequence = registration.slot, registration.sequence

    async def handle(self, message: pb.PublishRequest) -> None:
        """Applies one message.

        Raises:
            ProtocolError: the message breaks the contract.
        """
        async with self._turn:
            try:
                match message.WhichOneof("message"):
                    case "events":
                        async with self._writes:
                            await self._apply_events(message.events)
                    case "snapshot":
                        async with self._writes:
                            await self._apply_snapshot_part(message.snapshot)
                    case "heartbeat":
                        await self._check(message.heartbeat.sequence)
                    case None:
                        pass  # from a newer worker; its known messages still count
                    case other:
                        raise ProtocolError("unexpected", f"{other} inside a Publish stream")
            except StoreUnavailableError:
                self._lost = True

    async def store_recovered(self) -> None:
        """Repairs the index after the store was down."""
        async with self._turn:
            try:
                if self._lost:
                    self._order_snapshot("store_recovered")
                else:
                    await self._check(self._sequence)
            except StoreUnavailableError:
                self._lost = True

    async def _apply_events(self, events: pb.BlockEvents) -> None:
        check_hashes(events.stored, events.removed)
        slot = self._slot
        if self._awaiting or self._lost or slot is None:
            metrics.EVENTS_APPLIED.labels("ignored").inc()
            return
        try:
            result = await self._guard.call(
                lambda store: store.apply_events(
                    slot, events.sequence, events.stored, events.removed
                )
            )
        except StoreUnavailableError:
            metrics.EVENTS_APPLIED.labels("failed").inc()
            raise
        metrics.EVENTS_APPLIED.labels(result.value).inc()
        if result is ApplyResult.APPLIED:
            self._acknowledge(events.sequence)
        else:
            self._order_snapshot(result.value)

    async def _apply_snapshot_part(self, part: pb.BlockSnapshot) -> None:
        check_hashes(part.held)
        if part.first:
            await self._drop_loading()
            self._loading = await self._guard.call(lambda s: s.begin_snapshot(self.publisher))
            # A failure from here on concerns this snapshot, not the state before it.
            self._lost = False
        slot = self._loading
        if slot is None or self._lost:
            return
        result = await self._guard.call(
            lambda store: store.apply_snapshot_part(slot, part.sequence, part.held, last=part.last)
        )
        if result is not ApplyResult.APPLIED:
            self._order_snapshot(result.value)
        elif part.last:
            self._slot, self._loading, self._awaiting = slot, None, False
            self._acknowledge(part.sequence)

    async def _check(self, sequence: int) -> None:
        """Renews the lease. Orders a snapshot if the store's sequence differs from the worker's."""
        slot = self._slot
        if self._awaiting or self._lost or slot is None:
            return
        if not await self._renewals.renew(slot, sequence):
            self._order_snapshot("unknown")

    async def _drop_loading(self) -> None:
        slot, self._loading = self._loading, None
        if slot is not None:
            await self._guard.call(lambda store: store.forget(slot))

    def _acknowledge(self, sequence: int) -> None:
        self._sequence = sequence
        self._outbox.put(pb.PublishResponse(ack=pb.PublishAck(sequence=sequence)))

    def _order_snapshot(self, reason: str) -> None:
        self._awaiting, self._lost, self._loading = True, False, None
        metrics.RESYNCS.labels(reason).inc()
        log.info(
            "resync_ordered",
            worker_id=self.publisher.worker_id,
            incarnation=self.publisher.incarnation,
            reason=reason,
        )
        self._outbox.put(pb.PublishResponse(resync=pb.ResyncOrder(reason=reason)))
