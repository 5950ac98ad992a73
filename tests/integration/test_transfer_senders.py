"""Senders that die, stall or talk nonsense, as a receiver over TCP meets them."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import FrameDecoder
from kvmesh.transfer.frames import (
    BlockRun,
    CommitFrame,
    ErrorFrame,
    Frame,
    HelloFrame,
    HelloOkFrame,
    PutFrame,
    QueryFrame,
)
from tests.transfer_pair import BLOCK, DECODE, LAYOUT, PREFILL, Pair, tcp_pair, until


class RawSender:
    """A sender that says whatever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.decoder = FrameDecoder(BLOCK)

    @classmethod
    async def connect(cls, pair: Pair, *, greet: bool = True) -> RawSender:
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
    async with tcp_pair() as pair:
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
    async with tcp_pair() as pair:
        sender = await RawSender.connect(pair)
        sender.say(_put())
        sender.writer.write(bytes(BLOCK))

        await until(lambda: pair.target.lost == [PREFILL])

        assert [ok for _, ok in pair.target.ended] == [False]
        await sender.close()


async def test_a_connection_without_hello_is_cut_but_an_idle_channel_is_not() -> None:
    async with tcp_pair() as pair:
        await pair.pool.commit(pair.reservation, 1, 1)
        silent = await RawSender.connect(pair, greet=False)

        with contextlib.suppress(ConnectionError):
            assert await silent.hear() is None

        await silent.close()
        assert pair.target.lost == []
        await pair.pool.commit(pair.reservation, 1, 1)
        assert pair.sent.channels == 1


async def test_a_damaged_payload_is_refused_and_ends_its_grant_with_false() -> None:
    async with tcp_pair() as pair:
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
    async with tcp_pair() as pair:
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
    async with tcp_pair() as pair:
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
