"""PublisherSession: what is ordered when the store fails between two messages."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.errors import ProtocolError
from kvmesh.core.slots import Publisher, Slot
from kvmesh.core.types import WorkerId
from kvmesh.metadata.memory_store import MemoryMetadataStore
from kvmesh.metadata.store import ApplyResult, StoreUnavailableError
from kvmesh.rpc.outbox import Outbox
from kvmesh.v1 import kv_manager_service_pb2 as pb
from services.kvmanager.guard import StoreGuard
from services.kvmanager.renewals import Renewals
from services.kvmanager.session import PublisherSession, publisher_from_hello

PUBLISHER = Publisher(WorkerId("w"), 1, "east", "n")
A, B, C = (bytes([number]) * 16 for number in range(3))


class FaultyStore(MemoryMetadataStore):
    """Refuses snapshot parts when told to."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), 10.0)
        self.fails = False

    async def apply_snapshot_part(
        self, slot: Slot, sequence: int, held: bytes, *, last: bool
    ) -> ApplyResult:
        if self.fails:
            raise StoreUnavailableError("told to")
        return await super().apply_snapshot_part(slot, sequence, held, last=last)


class Stage:
    """A session over a store, and all that it told its worker."""

    def __init__(self) -> None:
        self.store = FaultyStore()
        self.guard = StoreGuard(self.store, 0.0, self._recovered)
        self.outbox: Outbox[pb.PublishResponse] = Outbox()
        writes = asyncio.Semaphore(1)
        renewals = Renewals(self.guard, writes)
        self.renewing = asyncio.ensure_future(renewals.run())
        self.session = PublisherSession(PUBLISHER, self.guard, self.outbox, writes, renewals)

    async def _recovered(self) -> None:
        await self.session.store_recovered()

    async def recover(self) -> None:
        """Lets the guard's probe succeed."""
        task = asyncio.ensure_future(self.guard.run())
        async with asyncio.timeout(10):
            while not self.guard.up:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def events(self, sequence: int, stored: bytes = b"") -> None:
        events = pb.BlockEvents(sequence=sequence, stored=stored)
        await self.session.handle(pb.PublishRequest(events=events))

    async def snapshot(self, sequence: int, held: bytes, *, first: bool, last: bool) -> None:
        part = pb.BlockSnapshot(sequence=sequence, held=held, first=first, last=last)
        await self.session.handle(pb.PublishRequest(snapshot=part))

    async def told(self) -> list[str | int]:
        """Ack sequences and resync reasons; nothing can be told after it."""
        self.outbox.close()
        return [
            m.ack.sequence if m.WhichOneof("message") == "ack" else m.resync.reason
            async for m in self.outbox
        ]

    async def holders(self, block_hash: bytes) -> int:
        return len(await self.store.match("n", block_hash))


async def test_snapshot_cut_off_by_a_failure_is_ordered_again() -> None:
    stage = Stage()
    await stage.session.open()
    await stage.events(2)
    await stage.snapshot(3, A, first=True, last=False)
    stage.store.fails = True
    await stage.snapshot(3, B, first=False, last=True)
    assert not stage.guard.up
    stage.store.fails = False
    await stage.recover()
    # Parts of the old snapshot that were on the way do not complete anything.
    await stage.snapshot(3, C, first=False, last=True)
    assert await stage.holders(A) == 0
    await stage.snapshot(4, A + B, first=True, last=True)
    assert await stage.holders(A) == await stage.holders(B) == 1
    assert await stage.holders(C) == 0
    assert await stage.told() == ["gap", "store_recovered", 4]


async def test_recovery_checks_a_session_that_was_quiet() -> None:
    stage = Stage()
    await stage.session.open()
    await stage.events(1, A)
    await stage.session.store_recovered()
    slot = (await stage.store.register(PUBLISHER)).slot
    await stage.store.forget(slot)
    await stage.session.store_recovered()
    assert await stage.told() == [1, "unknown"]


async def test_session_opened_without_the_store_orders_a_snapshot_once_it_is_there() -> None:
    stage = Stage()
    stage.store.fails = True
    with pytest.raises(StoreUnavailableError):
        await stage.guard.call(lambda s: s.apply_snapshot_part(Slot("x"), 1, b"", last=True))
    await stage.session.open()
    await stage.events(1, A)
    stage.store.fails = False
    await stage.recover()
    await stage.snapshot(2, A, first=True, last=True)
    assert await stage.holders(A) == 1
    assert await stage.told() == ["store_recovered", 2]


async def test_second_snapshot_replaces_an_unfinished_one() -> None:
    stage = Stage()
    await stage.session.open()
    await stage.snapshot(1, A, first=True, last=False)
    await stage.snapshot(2, B, first=True, last=True)
    assert await stage.holders(A) == 0
    assert await stage.holders(B) == 1
    assert await stage.store.sweep(100) == 1


async def test_second_hello_breaks_the_contract() -> None:
    stage = Stage()
    await stage.session.open()
    with pytest.raises(ProtocolError, match="hello"):
        await stage.session.handle(pb.PublishRequest(hello=pb.PublisherHello(worker_id="w")))


async def test_a_message_of_a_newer_worker_is_left_alone() -> None:
    stage = Stage()
    await stage.session.open()
    unknown = pb.PublishRequest.FromString(b"\xfa\x7f\x00")  # field 2047, of no bytes
    await stage.session.handle(unknown)
    with pytest.raises(ProtocolError, match="hello"):
        await stage.session.handle(pb.PublishRequest(hello=pb.PublisherHello()))


@pytest.mark.parametrize(
    ("worker_id", "namespace", "reason"),
    [("", "n", "bad_hello"), ("w", "", "bad_hello"), ("w", "n", None)],
)
def test_a_hello_names_its_worker_and_namespace(
    worker_id: str, namespace: str, reason: str | None
) -> None:
    hello = pb.PublisherHello(
        worker_id=worker_id, namespace=namespace, incarnation=1, cluster="east"
    )
    message = pb.PublishRequest(hello=hello)
    if reason is None:
        assert publisher_from_hello(message) == PUBLISHER
        return
    with pytest.raises(ProtocolError) as caught:
        publisher_from_hello(message)
    assert caught.value.reason == reason


def test_a_stream_begins_with_a_hello() -> None:
    with pytest.raises(ProtocolError, match="first message"):
        publisher_from_hello(pb.PublishRequest(events=pb.BlockEvents(sequence=1)))


async def test_hashes_that_are_cut_off_break_the_contract_and_change_nothing() -> None:
    stage = Stage()
    await stage.session.open()
    for events in (
        pb.BlockEvents(sequence=1, stored=A + B[:5]),
        pb.BlockEvents(sequence=1, stored=A, removed=B[:5]),
    ):
        with pytest.raises(ProtocolError, match="16-byte"):
            await stage.session.handle(pb.PublishRequest(events=events))
    with pytest.raises(ProtocolError, match="16-byte"):
        await stage.snapshot(1, A[:15], first=True, last=True)
    assert await stage.holders(A) == 0
    assert await stage.told() == []


async def test_a_heartbeat_of_another_sequence_orders_a_snapshot_and_of_the_same_none() -> None:
    stage = Stage()
    await stage.session.open()
    await stage.events(1, A)
    for sequence in (1, 2, 3):  # the last one comes while the snapshot is awaited
        beat = pb.PublisherHeartbeat(sequence=sequence)
        await stage.session.handle(pb.PublishRequest(heartbeat=beat))
    assert await stage.told() == [1, "unknown"]


async def test_events_while_a_snapshot_is_awaited_are_left_out() -> None:
    stage = Stage()
    await stage.session.open()
    await stage.events(2, A)  # a gap
    await stage.events(1, B)
    assert await stage.holders(B) == 0
    assert await stage.told() == ["gap"]
