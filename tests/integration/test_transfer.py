"""Both ends of the TCP data channel over loopback, with a target that records."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, RefusalReason, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.alignment import Run
from kvmesh.transfer.channel_pool import ChannelPool, SendOptions
from kvmesh.transfer.codec import HEADER, encode_frame
from kvmesh.transfer.data_server import DataServer, ReceiveOptions
from kvmesh.transfer.decoder import FrameDecoder
from kvmesh.transfer.frames import (
    BlockRun,
    CommitFrame,
    CommitOkFrame,
    ErrorFrame,
    Frame,
    HelloFrame,
    HelloOkFrame,
    PutFrame,
    PutOkFrame,
    QueryFrame,
)
from kvmesh.transfer.meters import LinkKey
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    LAYOUT,
    PREFILL,
    RECEIVER,
    SENDER,
    STALL_S,
    Pair,
    RecordingTarget,
    SourcePool,
    reservation_at,
    reservation_behind,
    running_pair,
    until,
    whole,
)


@pytest.fixture
def source() -> Iterator[SourcePool]:
    source = SourcePool()
    yield source
    source.close()


def _pool(source: SourcePool, stall_timeout_s: float = STALL_S) -> ChannelPool:
    options = SendOptions(kinds=("tcp",), connect_timeout_s=5, stall_timeout_s=stall_timeout_s)
    return ChannelPool(SENDER, source, options)


def _pair(stall_timeout_s: float = STALL_S) -> AbstractAsyncContextManager[Pair]:
    return running_pair(
        SendOptions(kinds=("tcp",), stall_timeout_s=stall_timeout_s),
        ReceiveOptions(stall_timeout_s=stall_timeout_s),
    )


async def _put_lands(pair: Pair) -> None:
    await pair.pool.put(pair.reservation, [Run(0, 1, 3)])
    assert pair.target.content(1, 3) == pair.source.read_view(0, 3)


async def test_a_small_transfer_does_not_wait_for_a_large_one() -> None:
    async with _pair(stall_timeout_s=5) as pair:
        large = asyncio.create_task(pair.pool.put(pair.reservation, whole(300)))
        await until(lambda: bool(pair.target.granted))

        await pair.pool.put(pair.reservation, [Run(0, 300, 1)])
        assert not large.done()
        await large


async def test_large_transfers_use_all_lanes_and_small_ones_open_none() -> None:
    async with _pair(stall_timeout_s=5) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        assert pair.pool.statistics().open_channels == 1

        await pair.pool.put(pair.reservation, whole(300))

        assert pair.pool.statistics().open_channels == 2
        assert pair.sent.rtt_s > 0
        (view,) = pair.pool.statistics().views()
        assert view.goodput_bytes_s > 0
        assert view.transferred_bytes == 301 * BLOCK


async def test_a_budget_is_kept() -> None:
    rate = 100e6
    options = SendOptions(kinds=("tcp",), stall_timeout_s=5, budget_bytes_s=rate)
    async with running_pair(options) as pair:
        started = asyncio.get_running_loop().time()

        await pair.pool.put(pair.reservation, whole(300))

        seconds = asyncio.get_running_loop().time() - started
        assert 300 * BLOCK / seconds <= rate * 1.15


async def test_a_budget_that_others_spend_is_not_the_silence_of_the_peer() -> None:
    rate = 10e6
    options = SendOptions(kinds=("tcp",), lanes=1, stall_timeout_s=STALL_S, egress_bytes_s=rate)
    async with running_pair(options) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        assert pair.pool.egress is not None
        # One waits for the budget, one for its turn on the connection.
        assert pair.pool.egress.delay(int(4 * STALL_S * rate)) > 3 * STALL_S
        await asyncio.gather(
            pair.pool.put(pair.reservation, whole(1)), pair.pool.put(pair.reservation, whole(1, 1))
        )
        assert (pair.sent.lost, pair.sent.resumed, pair.sent.channels) == (0, 0, 1)


async def test_what_arrived_of_a_slow_transfer_counts_before_all_has() -> None:
    total = 100 * BLOCK
    options = SendOptions(kinds=("tcp",), stall_timeout_s=5, budget_bytes_s=20e6)
    async with running_pair(options) as pair:
        pool = pair.pool
        under_way = asyncio.create_task(pool.put(pair.reservation, whole(100)))

        await until(lambda: 0 < pool.sent_bytes < total or under_way.done())

        assert not under_way.done()
        assert pool.sent_bytes + pool.sending_bytes == total
        await under_way
        assert (pool.sent_bytes, pool.sending_bytes) == (total, 0)
        under_way = asyncio.create_task(pool.put(pair.reservation, whole(100)))
        await until(lambda: pool.sent_bytes > total or under_way.done())
        seen = pool.sent_bytes
        assert seen > total
        under_way.cancel()
        await asyncio.wait([under_way])
        assert under_way.cancelled()
        assert pool.sending_bytes == 0
        assert seen <= pool.sent_bytes <= 2 * total, "it left, and a total does not fall"
        assert pair.sent.bytes == total, "what was cut off is no KV"


async def test_the_egress_of_a_worker_is_one_budget_for_all_its_peers() -> None:
    options = SendOptions(kinds=("tcp",), stall_timeout_s=5, egress_bytes_s=100e6)
    async with running_pair(options) as one, running_pair() as two:
        started = asyncio.get_running_loop().time()

        # One sender, two receivers.
        await asyncio.gather(
            one.pool.put(one.reservation, whole(150)), one.pool.put(two.reservation, whole(150))
        )

        seconds = asyncio.get_running_loop().time() - started
        assert 300 * BLOCK / seconds <= 100e6 * 1.15


async def test_another_incarnation_is_refused_at_hello() -> None:
    async with _pair() as pair:
        reservation = reservation_behind(pair.reservation.data_endpoint, incarnation=6)

        with pytest.raises(RefusedError, match="identity: this is d0/7, not d0/6") as caught:
            await pair.pool.put(reservation, whole(1))

        assert caught.value.refusal.reason is RefusalReason.STALE
        assert pair.target.lost == []


async def test_nobody_at_the_endpoint_is_lost(source: SourcePool) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are rejected
        pool = _pool(source)
        with pytest.raises(LostError, match="data channel to"):
            await pool.commit(
                reservation_behind(Endpoint("127.0.0.1", unused.getsockname()[1])), 1, 1
            )
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


async def test_a_receiver_that_stops_reading_is_noticed_in_the_stall_time(
    source: SourcePool,
) -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await released.wait()

    async with _listening(serve) as endpoint:
        pool = _pool(source)
        started = asyncio.get_running_loop().time()
        with pytest.raises(LostError, match=r"no progress for 0\.3 s"):
            await pool.put(reservation_behind(endpoint), whole(300))
        assert asyncio.get_running_loop().time() - started < 10 * STALL_S
        assert pool.statistics().links[LinkKey(DECODE, "tcp", "sent")].lost == 1
        released.set()
        await pool.close()


async def test_a_receiver_that_never_answers_is_noticed_in_the_stall_time(
    source: SourcePool,
) -> None:
    released = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        await released.wait()

    async with _listening(serve) as endpoint:
        pool = _pool(source)
        with pytest.raises(LostError, match="no progress"):
            await pool.commit(reservation_behind(endpoint), 1, 1)
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
async def test_a_receiver_that_answers_nonsense_is_lost(
    source: SourcePool, answer: Frame | bytes
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        await reader.readexactly(HEADER.size + BLOCK)
        writer.write(answer if isinstance(answer, bytes) else encode_frame(answer))
        await writer.drain()

    async with _listening(serve) as endpoint:
        pool = _pool(source)
        with pytest.raises(LostError):
            await pool.put(reservation_behind(endpoint), whole(1))
        await until(lambda: pool.statistics().open_channels == 0)
        await pool.close()


async def test_a_receiver_that_dies_midway_is_lost_and_the_next_call_finds_its_successor() -> None:
    async with _pair() as pair:
        closing: list[asyncio.Task[None]] = []
        pair.target.on_grant = lambda: closing.append(asyncio.create_task(pair.server.close()))

        with pytest.raises(LostError):
            await pair.pool.put(pair.reservation, whole(300))
        await closing[0]

        assert [ok for _, ok in pair.target.ended] == [False]
        # Once, or twice if the sender's new connection came in before the server had closed.
        assert set(pair.target.lost) == {PREFILL}
        target = RecordingTarget()
        identity = replace(RECEIVER, incarnation=8)
        successor = DataServer(identity, target)
        reservation = reservation_at(await successor.start(), incarnation=8)
        await pair.pool.put(reservation, whole(1))
        assert target.content(0, 1) == pair.source.read_view(0, 1)
        await successor.close()


async def test_a_channel_that_ended_is_opened_again() -> None:
    async with _pair() as pair:
        await pair.pool.commit(pair.reservation, 1, 1)
        for task in list(pair.server._serving):
            task.cancel()
        await until(lambda: pair.pool.statistics().open_channels == 0)

        await pair.pool.commit(pair.reservation, 1, 1)

        assert len(pair.target.commits) == 2
        assert pair.sent.channels == 2


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
        num_bytes = frame.operand_bytes if isinstance(frame, QueryFrame) else num_bytes
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


async def test_a_sender_that_dies_midway_ends_its_grant_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvmesh.transfer.data_server")
    async with _pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put())
        sender.writer.write(bytes(BLOCK))
        await until(lambda: bool(pair.target.granted))

        await sender.close()

        await until(lambda: pair.target.lost == [PREFILL])
        assert [ok for _, ok in pair.target.ended] == [False]
    ended = [each for each in caplog.records if each.getMessage() == "data_channel_ended"]
    assert [vars(each)["fields"]["peer"] for each in ended] == [PREFILL]
    assert vars(ended[0])["fields"]["cause"] != "closed"


async def test_a_sender_that_stalls_midway_is_cut() -> None:
    async with _pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put())
        sender.writer.write(bytes(BLOCK))

        await until(lambda: pair.target.lost == [PREFILL])

        assert [ok for _, ok in pair.target.ended] == [False]
        await sender.close()


async def test_a_stale_writer_can_be_cut_and_an_ended_one_is_left_alone() -> None:
    async with _pair(stall_timeout_s=30) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        sender = await RawSender.connect(pair)
        sender.say(_put())
        sender.writer.write(bytes(BLOCK))
        await until(lambda: len(pair.target.granted) == 2)
        ended, stale = pair.target.granted

        pair.server.cut(ended)
        pair.server.cut(stale)

        await until(lambda: pair.target.lost == [PREFILL])
        assert [ok for _, ok in pair.target.ended] == [True, False]
        await until(lambda: pair.server.statistics().open_channels == 1)
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
        assert pair.sent.channels == 1


async def test_a_damaged_payload_is_refused_and_ends_its_grant_with_false() -> None:
    async with _pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put(1))
        sender.writer.write(bytes(BLOCK) + b"\1\2\3\4")

        answer = await sender.hear()

        assert isinstance(answer, ErrorFrame)
        assert (answer.transfer_id, answer.reason) == (1, "checksum")
        assert [ok for _, ok in pair.target.ended] == [False]
        sender.say(
            QueryFrame(2, op=1, answer_bytes=8, arguments=b"", operand_bytes=4, checksum=False)
        )
        sender.writer.write(bytes(4))
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


async def test_a_put_that_is_cancelled_twice_cuts_the_channel(source: SourcePool) -> None:
    released = asyncio.Event()
    greeted = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _greet(reader, writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        greeted.set()
        await released.wait()

    async with _listening(serve) as endpoint:
        # Longer than the test may take: nothing but the second cancellation ends it.
        pool = _pool(source, stall_timeout_s=300)
        task = asyncio.create_task(pool.put(reservation_behind(endpoint), whole(300)))
        await greeted.wait()
        await until(lambda: pool.statistics().open_channels == 1)
        for _ in range(200):  # let the send fill the socket
            await asyncio.sleep(0)

        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: pool.statistics().open_channels == 0)
        released.set()
        await pool.close()


async def test_links_of_workers_that_left_are_dropped_when_another_comes(
    source: SourcePool,
) -> None:
    options = SendOptions(kinds=("tcp",))
    second = replace(RECEIVER, worker_id=WorkerId("d1"))
    async with running_pair(options) as pair:
        target = RecordingTarget()
        server = DataServer(second, target)
        there = replace(reservation_at(await server.start()), worker_id=second.worker_id)
        pool = ChannelPool(replace(SENDER, worker_id=WorkerId("p1")), source, options)
        await pool.put(there, whole(2))
        assert {key.peer for key in server.statistics().links} == {"p1"}
        await server.close()
        target.pool.close()
        await until(lambda: pool.statistics().open_channels == 0)

        await pool.put(pair.reservation, whole(1))
        assert {key.peer for key in pool.statistics().links} == {DECODE}
        assert pool.sent_bytes == 3 * BLOCK
        await pool.close()
        await until(lambda: pair.server.statistics().open_channels == 0)

        await _put_lands(pair)
        assert {key.peer for key in pair.server.statistics().links} == {PREFILL}
