"""Both ends of the TCP data channel over loopback, with a target that records."""

import asyncio
import contextlib
import dataclasses
import hmac
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import uvloop

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import (
    Endpoint,
    KvLayout,
    Refusal,
    RefusalReason,
    Reservation,
    WorkerId,
)
from kvmesh.transfer.codec import HEADER, encode_frame
from kvmesh.transfer.decoder import FrameDecoder
from kvmesh.transfer.frames import (
    BlockRun,
    CommitFrame,
    CommitOkFrame,
    ErrorFrame,
    Frame,
    FrameType,
    HelloFrame,
    HelloOkFrame,
    PutFrame,
    PutOkFrame,
    ReservedFrame,
    WriteClaim,
)
from kvmesh.transfer.payload import FRAME_BYTES
from kvmesh.transfer.sockets import FrameSocket
from kvmesh.transfer.target import WriteGrant
from kvmesh.transfer.tcp import ChannelPool, DataServer

LAYOUT = KvLayout("model", "float32", 16, 4, 2, 64)
BLOCK = LAYOUT.block_bytes  # 64 KiB
NUM_BLOCKS = 320  # more than two full frames
FRAME_BLOCKS = FRAME_BYTES // BLOCK
PREFILL, DECODE = WorkerId("p0"), WorkerId("d0")
STALL_S = 0.3


@dataclass
class RecordingTarget:
    """Blocks in reverse order, so that index and place differ; remembers all that happens."""

    pool: bytearray = field(default_factory=lambda: bytearray(NUM_BLOCKS * BLOCK))
    capability: bytes = b"secret"
    refuse: Refusal | None = None
    granted: list[WriteGrant] = field(default_factory=list)
    ended: list[tuple[WriteGrant, bool]] = field(default_factory=list)
    commits: list[CommitFrame] = field(default_factory=list)
    lost: list[WorkerId] = field(default_factory=list)
    on_grant: Callable[[], None] = lambda: None

    def block(self, index: int) -> memoryview:
        place = NUM_BLOCKS - 1 - index
        return memoryview(self.pool)[place * BLOCK : (place + 1) * BLOCK]

    def begin_write(self, put: PutFrame) -> WriteGrant | Refusal:
        if self.refuse is not None:
            return self.refuse
        if not hmac.compare_digest(put.claim.capability, self.capability):
            return Refusal(RefusalReason.STALE, "capability")
        if any(run.first + run.count > NUM_BLOCKS for run in put.runs):
            return Refusal(RefusalReason.INVALID, "outside of the reservation")
        indexes = [run.first + i for run in put.runs for i in range(run.count)]
        grant = WriteGrant(put, tuple(self.block(index) for index in indexes))
        self.granted.append(grant)
        self.on_grant()
        return grant

    def end_write(self, grant: WriteGrant, ok: bool) -> None:
        self.ended.append((grant, ok))

    def commit(self, frame: CommitFrame) -> Refusal | None:
        if self.refuse is not None:
            return self.refuse
        self.commits.append(frame)
        return None

    def peer_lost(self, worker_id: WorkerId) -> None:
        self.lost.append(worker_id)

    def content(self, first: int, count: int) -> bytes:
        return b"".join(self.block(index) for index in range(first, first + count))

    def check_grants_ended_once(self) -> None:
        assert [grant for grant, _ in self.ended] == self.granted


@dataclass
class Pair:
    target: RecordingTarget
    server: DataServer
    pool: ChannelPool
    reservation: Reservation


def _reservation(endpoint: Endpoint, incarnation: int = 7) -> Reservation:
    return Reservation(
        reservation_id=11,
        worker_id=DECODE,
        incarnation=incarnation,
        generation=1,
        capability=b"secret",
        data_endpoint=endpoint,
        num_cached_blocks=0,
        num_blocks=NUM_BLOCKS,
        lease_ms=1000,
    )


def _pool(layout: KvLayout = LAYOUT, *, checksum: bool = True) -> ChannelPool:
    return ChannelPool(
        layout, PREFILL, 3, connect_timeout_s=5, stall_timeout_s=STALL_S, checksum=checksum
    )


@contextlib.asynccontextmanager
async def _pair(stall_timeout_s: float = STALL_S, *, checksum: bool = True) -> AsyncIterator[Pair]:
    target = RecordingTarget()
    server = DataServer(LAYOUT, DECODE, 7, target, stall_timeout_s=stall_timeout_s)
    endpoint = await server.start()
    pool = _pool(checksum=checksum)
    try:
        yield Pair(target, server, pool, _reservation(endpoint))
    finally:
        await pool.close()
        await server.close()
        target.check_grants_ended_once()


def _kv(num_blocks: int, seed: int = 0) -> memoryview:
    return memoryview(random.Random(seed).randbytes(num_blocks * BLOCK))


async def _until(fact: Callable[[], bool]) -> None:
    """Lets the loop turn until something is true; the test's own timeout bounds it."""
    while not fact():
        await asyncio.sleep(0)


async def _put_lands(pair: Pair) -> None:
    data = _kv(300)
    views = [data[:BLOCK], data[BLOCK : 7 * BLOCK + 5], data[7 * BLOCK + 5 :]]

    await pair.pool.put(pair.reservation, [(2, 10), (20, 290)], views)
    await pair.pool.commit(pair.reservation, 42, 4700)

    assert pair.target.content(2, 10) == data[: 10 * BLOCK]
    assert pair.target.content(20, 290) == data[10 * BLOCK :]
    assert not any(pair.target.content(0, 2) + pair.target.content(12, 8))
    assert all(ok for _, ok in pair.target.ended)
    claim = WriteClaim(11, 7, 1, b"secret")
    assert pair.target.commits == [CommitFrame(2, claim, 42, 4700, NUM_BLOCKS)]


@pytest.mark.parametrize("checksum", [True, False])
async def test_megabytes_land_byte_for_byte(checksum: bool) -> None:
    async with _pair(checksum=checksum) as pair:
        await _put_lands(pair)

        sent = pair.pool.statistics().peers[DECODE]
        received = pair.server.statistics().peers[PREFILL]
        assert sent.bytes == received.bytes == 300 * BLOCK
        assert sent.calls == received.calls == -(-300 // FRAME_BLOCKS)
        assert (sent.commits, sent.channels, sent.refused, sent.lost) == (1, 1, 0, 0)
        assert sent.seconds > 0
        assert pair.server.statistics().open_channels == 1
        assert pair.pool.statistics().open_channels == 1


def test_the_same_under_uvloop() -> None:
    async def scenario() -> None:
        async with _pair() as pair:
            await _put_lands(pair)

    uvloop.run(scenario())


async def test_concurrent_transfers_share_one_channel() -> None:
    async with _pair() as pair:
        parts = [(first, _kv(20, seed=first)) for first in range(0, NUM_BLOCKS, 20)]

        await asyncio.gather(
            *(pair.pool.put(pair.reservation, [(first, 20)], [data]) for first, data in parts)
        )

        for first, data in parts:
            assert pair.target.content(first, 20) == data
        assert pair.pool.statistics().peers[DECODE].channels == 1


async def test_a_small_transfer_does_not_wait_for_a_large_one() -> None:
    async with _pair() as pair:
        large = asyncio.create_task(pair.pool.put(pair.reservation, [(0, 300)], [_kv(300)]))
        await _until(lambda: bool(pair.target.granted))

        await pair.pool.put(pair.reservation, [(300, 1)], [_kv(1)])
        assert not large.done()
        await large


async def test_a_refused_transfer_leaves_the_channel_usable() -> None:
    async with _pair() as pair:
        refusal = Refusal(RefusalReason.DRAINING, "leaving", work_done=True, retry_after_ms=70)
        pair.target.refuse = refusal
        with pytest.raises(RefusedError) as caught:
            await pair.pool.put(pair.reservation, [(0, 300)], [_kv(300)])
        assert caught.value.refusal == refusal
        with pytest.raises(RefusedError) as caught:
            await pair.pool.commit(pair.reservation, 42, 10)
        assert caught.value.refusal == refusal
        assert not any(pair.target.pool)

        pair.target.refuse = None
        await _put_lands_after_refusals(pair)
        assert pair.pool.statistics().peers[DECODE].channels == 1
        assert pair.pool.statistics().peers[DECODE].refused == 2


async def _put_lands_after_refusals(pair: Pair) -> None:
    data = _kv(3)
    await pair.pool.put(pair.reservation, [(1, 3)], [data])
    assert pair.target.content(1, 3) == data


@pytest.mark.parametrize(
    ("change", "runs", "reason"),
    [
        ({"capability": b"guess"}, [(0, 1)], RefusalReason.STALE),
        ({"capability": b""}, [(0, 1)], RefusalReason.STALE),
        ({}, [(NUM_BLOCKS - 1, 2)], RefusalReason.INVALID),
        ({}, [(2**32 - 1, 1)], RefusalReason.INVALID),
    ],
)
async def test_writes_without_right_are_refused_and_nothing_is_written(
    change: dict[str, bytes], runs: list[tuple[int, int]], reason: RefusalReason
) -> None:
    async with _pair() as pair:
        reservation = dataclasses.replace(pair.reservation, **change)  # type: ignore[arg-type]

        with pytest.raises(RefusedError) as caught:
            await pair.pool.put(reservation, runs, [_kv(sum(count for _, count in runs))])

        assert caught.value.refusal.reason is reason
        assert not any(pair.target.pool)
        await _put_lands_after_refusals(pair)


async def test_another_incarnation_is_refused_at_hello() -> None:
    async with _pair() as pair:
        reservation = _reservation(pair.reservation.data_endpoint, incarnation=6)

        with pytest.raises(RefusedError, match="identity: this is d0/7, not d0/6") as caught:
            await pair.pool.put(reservation, [(0, 1)], [_kv(1)])

        assert caught.value.refusal.reason is RefusalReason.STALE
        assert pair.target.lost == []


async def test_another_layout_is_refused_at_hello() -> None:
    async with _pair() as pair:
        pool = _pool(dataclasses.replace(LAYOUT, num_layers=2, block_size=32))

        with pytest.raises(RefusedError, match="num_layers 2 there, 4 here") as caught:
            await pool.put(pair.reservation, [(0, 1)], [_kv(1)])

        assert caught.value.refusal.reason is RefusalReason.INVALID
        await pool.close()


async def test_nobody_at_the_endpoint_is_lost() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are rejected
        pool = _pool()
        with pytest.raises(LostError, match="data channel to"):
            await pool.commit(_reservation(Endpoint("127.0.0.1", unused.getsockname()[1])), 1, 1)
        await pool.close()


@contextlib.asynccontextmanager
async def _listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Endpoint]:
    """A server of plain bytes, for receivers that misbehave."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readexactly(HEADER.size)
    await reader.readexactly(int.from_bytes(head[8:12], "little"))
    writer.write(encode_frame(HelloOkFrame(DECODE, 7)))


async def test_a_receiver_that_stops_reading_is_noticed_in_the_stall_time() -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await released.wait()

    async with _listening(serve) as endpoint:
        pool = _pool()
        started = asyncio.get_running_loop().time()
        with pytest.raises(LostError, match=r"no progress for 0\.3 s"):
            await pool.put(_reservation(endpoint), [(0, 300)], [_kv(300)])
        assert asyncio.get_running_loop().time() - started < 10 * STALL_S
        assert pool.statistics().peers[DECODE].lost == 1
        released.set()
        await pool.close()


async def test_a_receiver_that_never_answers_is_noticed_in_the_stall_time() -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        await released.wait()

    async with _listening(serve) as endpoint:
        pool = _pool()
        with pytest.raises(LostError, match="no progress"):
            await pool.commit(_reservation(endpoint), 1, 1)
        released.set()
        await pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        PutOkFrame(77, 1),
        PutOkFrame(1, 2**63),
        CommitOkFrame(1),
        HelloOkFrame(DECODE, 7),
        ErrorFrame(0, "bad_magic", "no"),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(28),
        encode_frame(PutOkFrame(1, BLOCK))[:-1],
        b"",
    ],
)
async def test_a_receiver_that_answers_nonsense_is_lost(answer: Frame | bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        await reader.readexactly(HEADER.size + BLOCK)
        writer.write(answer if isinstance(answer, bytes) else encode_frame(answer))
        await writer.drain()

    async with _listening(serve) as endpoint:
        pool = _pool()
        with pytest.raises(LostError):
            await pool.put(_reservation(endpoint), [(0, 1)], [_kv(1)])
        await _until(lambda: pool.statistics().open_channels == 0)
        await pool.close()


async def test_a_receiver_that_dies_midway_is_lost_and_the_next_call_finds_its_successor() -> None:
    async with _pair() as pair:
        closing: list[asyncio.Task[None]] = []
        pair.target.on_grant = lambda: closing.append(asyncio.create_task(pair.server.close()))

        with pytest.raises(LostError):
            await pair.pool.put(pair.reservation, [(0, 300)], [_kv(300)])
        await closing[0]

        assert [ok for _, ok in pair.target.ended] == [False]
        assert pair.target.lost == [PREFILL]
        target = RecordingTarget()
        successor = DataServer(LAYOUT, DECODE, 8, target)
        reservation = _reservation(await successor.start(), incarnation=8)
        await pair.pool.put(reservation, [(0, 1)], [_kv(1)])
        assert target.content(0, 1) == _kv(1)
        await successor.close()


async def test_a_channel_that_ended_is_opened_again() -> None:
    async with _pair() as pair:
        await pair.pool.commit(pair.reservation, 1, 1)
        for task in list(pair.server._serving):
            task.cancel()
        await _until(lambda: pair.pool.statistics().open_channels == 0)

        await pair.pool.commit(pair.reservation, 1, 1)

        assert len(pair.target.commits) == 2
        assert pair.pool.statistics().peers[DECODE].channels == 2


class RawSender:
    """A sender that says whatever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = FrameDecoder(BLOCK)

    @classmethod
    async def connect(cls, pair: Pair, *, greet: bool = True) -> "RawSender":
        endpoint = pair.reservation.data_endpoint
        sender = cls(*await asyncio.open_connection(endpoint.host, endpoint.port))
        if greet:
            sender.say(HelloFrame(PREFILL, 3, DECODE, 7, LAYOUT))
            assert await sender.hear() == HelloOkFrame(DECODE, 7)
        return sender

    def say(self, frame: Frame) -> None:
        num_bytes = frame.num_blocks * BLOCK if isinstance(frame, PutFrame) else 0
        self.writer.write(encode_frame(frame, num_bytes))

    async def hear(self) -> Frame | None:
        while data := await self.reader.read(self.decoder.wanted):
            for event in self.decoder.feed(data):
                return event  # type: ignore[return-value]
        return None

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def _put(count: int = 4, incarnation: int = 7) -> PutFrame:
    claim = WriteClaim(11, incarnation, 1, b"secret")
    return PutFrame(1, claim, (BlockRun(0, count),))


async def test_a_sender_that_dies_midway_ends_its_grant_once() -> None:
    async with _pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put())
        sender.writer.write(bytes(BLOCK))
        await _until(lambda: bool(pair.target.granted))

        await sender.close()

        await _until(lambda: pair.target.lost == [PREFILL])
        assert [ok for _, ok in pair.target.ended] == [False]


async def test_a_sender_that_stalls_midway_is_cut() -> None:
    async with _pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put())
        sender.writer.write(bytes(BLOCK))

        await _until(lambda: pair.target.lost == [PREFILL])

        assert [ok for _, ok in pair.target.ended] == [False]
        await sender.close()


async def test_a_stale_writer_can_be_cut_and_an_ended_one_is_left_alone() -> None:
    async with _pair(stall_timeout_s=30) as pair:
        await pair.pool.put(pair.reservation, [(0, 1)], [_kv(1)])
        sender = await RawSender.connect(pair)
        sender.say(_put())
        sender.writer.write(bytes(BLOCK))
        await _until(lambda: len(pair.target.granted) == 2)
        ended, stale = pair.target.granted

        pair.server.cut(ended)
        pair.server.cut(stale)

        await _until(lambda: pair.target.lost == [PREFILL])
        assert [ok for _, ok in pair.target.ended] == [True, False]
        await _until(lambda: pair.server.statistics().open_channels == 1)
        await sender.close()


async def test_a_connection_without_hello_is_cut_but_an_idle_channel_is_not() -> None:
    async with _pair() as pair:
        await pair.pool.commit(pair.reservation, 1, 1)
        silent = await RawSender.connect(pair, greet=False)

        with contextlib.suppress(ConnectionError):
            assert await silent.hear() is None

        await silent.close()
        assert pair.target.lost == []
        await pair.pool.commit(pair.reservation, 1, 1)
        assert pair.pool.statistics().peers[DECODE].channels == 1


async def test_a_damaged_payload_is_refused_and_ends_its_grant_with_false() -> None:
    async with _pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put(1))
        sender.writer.write(bytes(BLOCK) + b"\1\2\3\4")

        answer = await sender.hear()

        assert isinstance(answer, ErrorFrame)
        assert (answer.transfer_id, answer.reason) == (1, "checksum")
        assert [ok for _, ok in pair.target.ended] == [False]
        sender.say(ReservedFrame(FrameType.QUERY, 2))
        answer = await sender.hear()
        assert isinstance(answer, ErrorFrame)
        assert (answer.transfer_id, answer.reason) == (2, "unsupported")
        await sender.close()


async def test_a_stale_incarnation_never_reaches_the_target() -> None:
    async with _pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put(1, incarnation=6))

        answer = await sender.hear()

        assert isinstance(answer, ErrorFrame)
        assert answer.reason == "stale"
        assert pair.target.granted == []
        await sender.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "bad_magic"),
        (encode_frame(_put(), 4 * BLOCK), "unexpected_frame"),
        (encode_frame(_put(), 3 * BLOCK), "bad_payload_size"),
        (encode_frame(CommitFrame(1, WriteClaim(1, 7, 1, b""), 1, 1, 1)), "unexpected_frame"),
    ],
)
async def test_a_stranger_is_told_why_and_sent_away(data: bytes, reason: str) -> None:
    async with _pair() as pair:
        sender = await RawSender.connect(pair, greet=False)
        sender.writer.write(data)

        with contextlib.suppress(ConnectionError):  # unread bytes may turn the end into a reset
            answer = await sender.hear()
            assert isinstance(answer, ErrorFrame)
            assert (answer.transfer_id, answer.reason) == (0, reason)
            assert await sender.hear() is None
        await sender.close()
        assert pair.target.granted == []
        assert pair.target.commits == []


async def test_a_cancelled_put_ends_at_a_frame_and_spares_the_others() -> None:
    async with _pair() as pair:
        data = memoryview(bytearray(_kv(300)))
        task = asyncio.create_task(pair.pool.put(pair.reservation, [(0, 300)], [data]))
        other = asyncio.create_task(pair.pool.put(pair.reservation, [(300, 1)], [_kv(1)]))
        await _until(lambda: bool(pair.target.granted))

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        data.release()  # raises BufferError while anything holds the memory

        await other
        await pair.pool.commit(pair.reservation, 1, 1)
        assert sum(grant.put.num_blocks for grant in pair.target.granted) < NUM_BLOCKS
        assert all(ok for _, ok in pair.target.ended)
        assert pair.pool.statistics().peers[DECODE].channels == 1


async def test_a_put_that_is_cancelled_twice_cuts_the_channel() -> None:
    released = asyncio.Event()
    greeted = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        greeted.set()
        await released.wait()

    async with _listening(serve) as endpoint:
        pool = ChannelPool(LAYOUT, PREFILL, 3, connect_timeout_s=5, stall_timeout_s=30)
        task = asyncio.create_task(pool.put(_reservation(endpoint), [(0, 300)], [_kv(300)]))
        await greeted.wait()
        await _until(lambda: pool.statistics().open_channels == 1)
        for _ in range(200):  # let the send fill the socket
            await asyncio.sleep(0)

        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await _until(lambda: pool.statistics().open_channels == 0)
        released.set()
        await pool.close()


async def test_a_closed_pool_opens_nothing() -> None:
    async with _pair() as pair:
        waiting = asyncio.create_task(pair.pool.put(pair.reservation, [(0, 300)], [_kv(300)]))
        await _until(lambda: bool(pair.target.granted))

        await pair.pool.close()
        await pair.pool.close()

        with pytest.raises(LostError):
            await waiting
        with pytest.raises(LostError, match="closed"):
            await pair.pool.commit(pair.reservation, 1, 1)
        await _until(lambda: pair.target.lost == [PREFILL])


async def test_a_cut_socket_wakes_its_reader_and_its_writer() -> None:
    left, right = socket.socketpair()
    left.setblocking(False)
    frames = FrameSocket(left, BLOCK, stall_timeout_s=30)
    writing = asyncio.create_task(frames.send(bytes(64 << 20)))
    reading = asyncio.create_task(frames.receive())
    await asyncio.sleep(0)

    frames.cut("a reason")

    for task in (writing, reading):
        with pytest.raises(LostError, match="a reason"):
            await task
    frames.close()
    right.close()
