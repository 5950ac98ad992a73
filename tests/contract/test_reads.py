"""GET over every kind of channel: what a reader may rely on, whatever carries the bytes."""

import asyncio
import hmac
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvmesh.core.clock import SystemClock
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, Refusal, RefusalReason
from kvmesh.transfer import data_server, frame_socket
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.frames import BlockRun, Checksum, GetFrame
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.native import NativeIo
from kvmesh.transfer.pacing import Pacer, Share, Ticket
from kvmesh.transfer.reader import BlockReader, ReadLease
from kvmesh.transfer.target import ReadGrant
from tests.contract.test_channels import CHANNELS, certificate, options_of
from tests.faulty_link import Faults, faulty_link
from tests.transfer_pair import (
    BLOCK,
    NUM_BLOCKS,
    RECEIVER,
    SENDER,
    STALL_S,
    RecordingTarget,
    SourcePool,
    reservation_behind,
    until,
    whole,
)

__all__ = ["certificate"]

# Channels from device to device read as the others of their kind.
KINDS = [name for name in CHANNELS if name != "tcp_with_budget" and "device" not in name]


@dataclass
class HeldBlocks:
    """A holder's blocks; index and place differ."""

    pool: SourcePool = field(default_factory=SourcePool)
    refuse: Refusal | None = None
    granted: list[ReadGrant] = field(default_factory=list)
    ended: list[ReadGrant] = field(default_factory=list)
    on_grant: Callable[[], None] = lambda: None

    def block(self, index: int) -> memoryview:
        return self.pool.read_view(NUM_BLOCKS - 1 - index, 1)

    def begin_read(self, get: GetFrame) -> ReadGrant | Refusal:
        if self.refuse is not None:
            return self.refuse
        if not hmac.compare_digest(get.claim.capability, b"secret"):
            return Refusal(RefusalReason.STALE, "capability")
        if any(run.first + run.count > NUM_BLOCKS for run in get.runs):
            return Refusal(RefusalReason.INVALID, "outside of the lease")
        indexes = [run.first + i for run in get.runs for i in range(run.count)]
        grant = ReadGrant(get, tuple(self.block(index) for index in indexes))
        self.granted.append(grant)
        self.on_grant()
        return grant

    def end_read(self, grant: ReadGrant) -> None:
        self.ended.append(grant)


@dataclass
class Reading:
    """A reader, a holder, and the lease between them."""

    held: HeldBlocks
    server: DataServer
    reader: BlockReader
    lease: ReadLease

    async def get(self, *runs: BlockRun, lease: ReadLease | None = None) -> bytearray:
        """The blocks of the lease in memory that was 0xEE before."""
        into = bytearray(b"\xee" * (sum(run.count for run in runs) * BLOCK))
        views = [memoryview(into)[: 3 * BLOCK // 2], memoryview(into)[3 * BLOCK // 2 :]]
        await self.reader.get(lease or self.lease, runs, [view for view in views if view])
        return into

    def content(self, *runs: BlockRun) -> bytes:
        return b"".join(self.held.block(r.first + i) for r in runs for i in range(r.count))


async def running(send: SendOptions, receive: ReceiveOptions) -> AsyncIterator[Reading]:
    hub, held = LocalHub(), HeldBlocks()
    server = DataServer(RECEIVER, RecordingTarget(), receive, source=held, hub=hub)
    address = await server.start()
    reader = BlockReader(SENDER, replace(send, connect_timeout_s=5), hub=hub)
    me = RECEIVER
    lease = ReadLease(
        11, me.worker_id, me.incarnation, 1, b"secret", address.endpoint, address.route
    )
    yield Reading(held, server, reader, lease)
    await reader.close()
    await server.close()
    held.pool.close()
    assert len(set(held.ended)) == len(held.ended)
    assert set(held.ended) == set(held.granted)


@pytest.fixture(params=KINDS)
async def reading(request: pytest.FixtureRequest) -> AsyncIterator[Reading]:
    send, receive = options_of(request.param, request)
    async for reading in running(send, receive):
        yield reading


@pytest.fixture
async def over_tcp() -> AsyncIterator[Reading]:
    send = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=5)
    async for reading in running(send, ReceiveOptions(stall_timeout_s=5)):
        yield reading


@pytest.fixture
async def impatient() -> AsyncIterator[Reading]:
    """Over TCP, where both ends are soon tired of waiting."""
    send = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=STALL_S)
    async for reading in running(send, ReceiveOptions(stall_timeout_s=STALL_S)):
        yield reading


async def test_blocks_arrive_byte_for_byte(reading: Reading) -> None:
    for runs in ([BlockRun(7, 1)], [BlockRun(5, 10), BlockRun(0, 1), BlockRun(30, 290)]):
        assert await reading.get(*runs) == reading.content(*runs)


class CountedPacer(Pacer):
    """A budget that lets everything through at once and counts it."""

    def __init__(self) -> None:
        super().__init__(1e6, SystemClock())
        self.num_bytes = 0

    def ask(self, num_bytes: int, share: Share, go: Callable[[], None]) -> Ticket:
        self.num_bytes += num_bytes
        go()
        return Ticket(num_bytes, share, go)


@pytest.mark.parametrize(("kind", "num_paced"), [("tcp", 301), ("shm", 0)])
async def test_what_leaves_the_host_by_reads_is_within_the_holders_budget(
    kind: str, num_paced: int
) -> None:
    pacer = CountedPacer()
    async for reading in running(SendOptions(kinds=(kind,)), ReceiveOptions(egress=pacer)):
        for run in (BlockRun(7, 1), BlockRun(0, 300)):
            assert await reading.get(run) == reading.content(run)
    assert pacer.num_bytes == num_paced * BLOCK


class SpentBudget(Pacer):
    """Lets small payloads through and keeps large ones for ever."""

    def __init__(self) -> None:
        super().__init__(16e6, SystemClock())
        self.num_kept = 0

    def ask(self, num_bytes: int, share: Share, go: Callable[[], None]) -> Ticket:
        if num_bytes < self.piece(share):
            go()
        else:
            self.num_kept += 1
        return Ticket(num_bytes, share, go)


async def test_what_a_budget_keeps_holds_up_neither_small_reads_nor_what_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_server, "_MAX_THREADS", 1)
    send, pacer = SendOptions(kinds=("tcp",), lanes=1), SpentBudget()
    async for reading in running(send, ReceiveOptions(egress=pacer)):
        kept = asyncio.create_task(reading.get(BlockRun(0, 100)))
        await until(lambda: pacer.num_kept > 0)
        source = SourcePool()
        other, pool = BlockReader(SENDER, send, hub=LocalHub()), ChannelPool(SENDER, source, send)
        into = bytearray(BLOCK)
        await other.get(reading.lease, [BlockRun(7, 1)], [memoryview(into)])
        assert into == reading.content(BlockRun(7, 1))
        await pool.put(reservation_behind(reading.lease.data_endpoint), whole(16))
        assert not kept.done()
        kept.cancel()
        await other.close()
        await pool.close()
        source.close()


async def test_a_handoff_goes_before_the_reads_beside_it() -> None:
    source, send = SourcePool(), SendOptions(kinds=("tcp",), lanes=1)
    pool = ChannelPool(SENDER, source, replace(send, egress_bytes_s=25e6))
    async for reading in running(send, ReceiveOptions(egress=pool.egress)):
        readers = [BlockReader(SENDER, send, hub=LocalHub()) for _ in range(8)]
        reads = [
            asyncio.create_task(
                each.get(reading.lease, [BlockRun(0, 100)], [memoryview(bytearray(100 * BLOCK))])
            )
            for each in readers
        ]
        granted = reading.held.granted
        while len(granted) < len(readers):
            await asyncio.sleep(0)
        # In one line with them it would have had a ninth of the budget: all would have ended.
        await pool.put(reservation_behind(reading.lease.data_endpoint), whole(200))
        assert not any(each.done() for each in reads)
        for each in reads:
            each.cancel()
        for reader in readers:
            await reader.close()
        budget = pool.egress
        assert budget is not None
        while not budget.is_idle:
            await asyncio.sleep(0)
        await pool.close()
        source.close()


async def test_reads_at_once_arrive_apart(reading: Reading) -> None:
    runs = [BlockRun(first, 16) for first in range(0, NUM_BLOCKS, 16)]
    read = await asyncio.gather(*(reading.get(run) for run in runs))
    assert [bytes(each) for each in read] == [reading.content(run) for run in runs]


async def test_a_holder_may_write_its_blocks_as_soon_as_a_read_has_ended(
    over_tcp: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tells it when the reader has the bytes, so none may be taken from its blocks later."""
    run, ended = BlockRun(0, 1), threading.Event()
    wanted = over_tcp.content(run)
    plain, receive = over_tcp.held.end_read, NativeIo.receive

    def end_read(grant: ReadGrant) -> None:
        plain(grant)
        over_tcp.held.pool.fill(0)
        ended.set()

    def receive_late(*args: Any, **kwargs: Any) -> int:
        assert ended.wait(20), "the block fits into the socket's queue"
        return receive(*args, **kwargs)

    monkeypatch.setattr(over_tcp.held, "end_read", end_read)
    monkeypatch.setattr(NativeIo, "receive", receive_late)
    monkeypatch.setattr(frame_socket, "INLINE_BYTES", 0)
    assert await over_tcp.get(run) == wanted


async def test_a_refusal_is_the_holders_and_the_next_read_goes_on(reading: Reading) -> None:
    refusal = Refusal(RefusalReason.DRAINING, "leaving", work_done=True, retry_after_ms=70)
    reading.held.refuse = refusal
    with pytest.raises(RefusedError) as caught:
        await reading.get(BlockRun(0, 2))
    assert caught.value.refusal == refusal

    reading.held.refuse = None
    assert await reading.get(BlockRun(0, 2)) == reading.content(BlockRun(0, 2))


@pytest.mark.parametrize(
    ("capability", "run", "reason"),
    [
        (b"guess", BlockRun(0, 1), RefusalReason.STALE),
        (b"", BlockRun(0, 1), RefusalReason.STALE),
        (b"secret", BlockRun(NUM_BLOCKS - 1, 2), RefusalReason.INVALID),
        (b"secret", BlockRun(2**32 - 1, 1), RefusalReason.INVALID),
    ],
)
async def test_reads_without_right_are_refused(
    reading: Reading, capability: bytes, run: BlockRun, reason: RefusalReason
) -> None:
    with pytest.raises(RefusedError) as caught:
        await reading.get(run, lease=replace(reading.lease, capability=capability))
    assert caught.value.refusal.reason is reason
    assert reading.held.granted == []


async def test_another_life_of_the_holder_is_not_read(reading: Reading) -> None:
    lease = replace(reading.lease, incarnation=reading.lease.incarnation + 1)
    with pytest.raises((RefusedError, LostError)):
        await reading.get(BlockRun(0, 1), lease=lease)
    assert reading.held.granted == []


async def test_after_a_cancelled_read_nobody_writes_and_the_next_one_works(
    reading: Reading,
) -> None:
    into = bytearray(300 * BLOCK)
    task = asyncio.create_task(
        reading.reader.get(reading.lease, [BlockRun(0, 300)], [memoryview(into)])
    )
    await until(lambda: bool(reading.held.granted))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    into[:] = bytes(len(into))

    assert await reading.get(BlockRun(0, 300)) == reading.content(BlockRun(0, 300))
    assert not any(into)


async def test_a_holder_that_closes_is_lost(reading: Reading) -> None:
    closing: list[asyncio.Task[None]] = []

    def close() -> None:
        if not closing:
            closing.append(asyncio.create_task(reading.server.close()))

    reading.held.on_grant = close

    async def read_twice() -> None:  # a copy within the process may finish before the close
        await reading.get(BlockRun(0, 300))
        await reading.get(BlockRun(0, 300))

    with pytest.raises(LostError):
        await read_twice()
    await closing[0]


async def test_a_closed_reader_reads_nothing(over_tcp: Reading) -> None:
    await over_tcp.get(BlockRun(0, 1))
    await over_tcp.reader.close()
    await over_tcp.reader.close()
    with pytest.raises(LostError, match="closed"):
        await over_tcp.get(BlockRun(0, 1))


async def test_connections_to_an_earlier_life_of_the_holder_are_freed(over_tcp: Reading) -> None:
    await over_tcp.get(BlockRun(0, 1))
    (lane,) = [place.lane for place in over_tcp.reader._places.values()]
    assert lane is not None
    await over_tcp.server.close()

    born_again = replace(RECEIVER, incarnation=RECEIVER.incarnation + 1)
    server = DataServer(born_again, RecordingTarget(), source=over_tcp.held, hub=LocalHub())
    endpoint = (await server.start()).endpoint
    lease = replace(over_tcp.lease, incarnation=born_again.incarnation, data_endpoint=endpoint)
    assert await over_tcp.get(BlockRun(0, 1), lease=lease) == over_tcp.content(BlockRun(0, 1))
    assert lane._frames.wire.fileno() == -1
    assert len(over_tcp.reader._places) == 1
    await over_tcp.reader.close()
    await server.close()


async def test_connections_are_kept_up_to_a_bound(
    over_tcp: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.transfer.reader.MAX_PLACES", 2)
    port = over_tcp.lease.data_endpoint.port
    for host in ("127.0.0.1", "127.0.1", "127.1"):  # one address, as three peers
        lease = replace(over_tcp.lease, data_endpoint=Endpoint(host, port))
        await over_tcp.get(BlockRun(0, 1), lease=lease)
    assert len(over_tcp.reader._places) == 2


async def test_a_worker_without_a_source_gives_nothing_away() -> None:
    server = DataServer(RECEIVER, RecordingTarget(), hub=LocalHub())
    endpoint = (await server.start()).endpoint
    reader = BlockReader(SENDER, SendOptions(kinds=("tcp",), lanes=2), hub=LocalHub())
    lease = ReadLease(11, RECEIVER.worker_id, RECEIVER.incarnation, 1, b"secret", endpoint)
    with pytest.raises(RefusedError, match="nothing is read"):
        await reader.get(lease, [BlockRun(0, 1)], [memoryview(bytearray(BLOCK))])
    await reader.close()
    await server.close()


@pytest.mark.parametrize("checksum", [Checksum.NONE, Checksum.CRC32C])
async def test_a_read_goes_on_after_a_cut(over_tcp: Reading, checksum: Checksum) -> None:
    # What passes towards the holder are greetings and requests: the second request is cut.
    faults = Faults(cut_at=[330])
    async with faulty_link(over_tcp.lease.data_endpoint, faults) as endpoint:
        lease = replace(over_tcp.lease, data_endpoint=endpoint)
        run = BlockRun(0, 300)
        assert await over_tcp.get(run, lease=lease) == over_tcp.content(run)
        await over_tcp.reader.close()
    assert faults.cut_at == []


async def test_a_holder_that_goes_silent_is_noticed_in_the_stall_time(impatient: Reading) -> None:
    faults = Faults(stall_at=250)
    async with faulty_link(impatient.lease.data_endpoint, faults) as endpoint:
        lease = replace(impatient.lease, data_endpoint=endpoint)
        with pytest.raises(LostError):
            await impatient.get(BlockRun(0, 300), lease=lease)
        assert faults.connections <= 2, "a holder that is silent is not asked again"
        await impatient.reader.close()
