"""Holders of KV that answer nonsense, as readers and askers meet them: lost or refused, in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from kvmesh.core.clock import SystemClock
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.asker import Asker
from kvmesh.transfer.attend import ClaimKind
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.codec import HEADER, encode_frame
from kvmesh.transfer.frames import (
    BlockRun,
    CancelFrame,
    Checksum,
    CommitOkFrame,
    DataFrame,
    ErrorFrame,
    Frame,
    HelloOkFrame,
    LinkTerms,
    PutOkFrame,
    QueryFrame,
)
from kvmesh.transfer.greeting import PeerKey
from kvmesh.transfer.holder import Holder
from kvmesh.transfer.local_channel import LocalHub
from kvmesh.transfer.reader import BlockReader, ReadLease
from kvmesh.transfer.remote_blocks import RemoteBlocks
from tests.transfer_pair import BLOCK, LAYOUT, RECEIVER, SENDER

ME, LIFE = RECEIVER.worker_id, RECEIVER.incarnation
TERMS = LinkTerms(Checksum.NONE, 0)
GREETING = encode_frame(HelloOkFrame(ME, LIFE, TERMS))
NO = WriteClaim(11, LIFE, 1, b"secret")
HEADS, DIM = 2 * LAYOUT.num_kv_heads, LAYOUT.head_dim
QUERIES = bytes(HEADS * DIM * 4)
ANSWER_BYTES = len(QUERIES) + HEADS * 4
IN_TIME_S = 15
Want = Callable[[Endpoint], Awaitable[None]]


def _data(num_bytes: int, transfer_id: int = 1, *, checksum: bool = False) -> bytes:
    return encode_frame(DataFrame(transfer_id, num_bytes, checksum), num_bytes)


def _frames(*frames: Frame) -> bytes:
    return b"".join(encode_frame(frame) for frame in frames)


GREETINGS = {
    "nothing": b"",
    "http": b"HTTP/1.1 200 OK\r\n\r\n" + bytes(100),
    "half": GREETING[:-1],
    "another worker": _frames(HelloOkFrame(WorkerId("d1"), LIFE, TERMS)),
    "another life": _frames(HelloOkFrame(ME, LIFE + 1, TERMS)),
    "data": _data(2**63),
    "a refusal": _frames(ErrorFrame(0, "layout", "another model")),
    "a word of its own": _frames(ErrorFrame(0, "x" * 1024, "y" * 1024)),
    "an answer": _frames(PutOkFrame(1, 1)),
}

ANSWERS = {
    "too many bytes announced": _data(2**63),
    "one byte too many announced": _data(BLOCK + 1),
    "one byte": _data(1) + b"x",
    "another question": _data(BLOCK, 2),
    "question 0": _data(BLOCK, 0),
    "a question that may come": _data(BLOCK, 2**64 - 1),
    "a greeting": GREETING,
    "a write": _frames(PutOkFrame(1, BLOCK)),
    "a commit": _frames(CommitOkFrame(1)),
    "a cancel": _frames(CancelFrame(1)),
    "a question": encode_frame(QueryFrame(1, 1, 1, b"", 64 << 20), 64 << 20),
    "the end": _frames(ErrorFrame(0, "checksum", "no")),
    "a refusal without a known reason": _frames(ErrorFrame(1, "because", "no", True, 2**32 - 1)),
    "refusals without end": _frames(*[ErrorFrame(1, "busy", "no")] * 10_000),
    "bytes without end": bytes(1 << 20),
    "nothing": b"",
}


@contextlib.asynccontextmanager
async def _holder(greeting: bytes, answer: bytes) -> AsyncIterator[Endpoint]:
    """Says these, whatever it is asked, and ends the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            for said in (greeting, answer):
                head = await reader.readexactly(HEADER.size)
                await reader.readexactly(int.from_bytes(head[8:12], "little"))
                await reader.readexactly(int.from_bytes(head[12:20], "little"))
                writer.write(said)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


OPTIONS = SendOptions(kinds=("tcp",), lanes=2, checksum=Checksum.NONE, stall_timeout_s=1)


async def _read(endpoint: Endpoint) -> None:
    reader = BlockReader(SENDER, replace(OPTIONS, connect_timeout_s=1), hub=LocalHub())
    lease = ReadLease(11, ME, LIFE, 1, b"secret", endpoint)
    try:
        for _ in range(2):
            await reader.get(lease, [BlockRun(0, 1)], [memoryview(bytearray(BLOCK))])
    finally:
        await reader.close()


async def _ask(endpoint: Endpoint) -> None:
    asker = Asker(SENDER, replace(OPTIONS, connect_timeout_s=1), SystemClock())
    holder = Holder(PeerKey(ME, LIFE), endpoint, None, ClaimKind.LEASE, NO)
    blocks = RemoteBlocks(asker, holder, range(2))

    def ask() -> None:
        for _ in range(2):
            blocks.ask(0, memoryview(QUERIES), (1, HEADS, DIM), 1.0).wait()

    try:
        await asyncio.to_thread(ask)
    finally:
        await asyncio.to_thread(asker.close)


WAYS = pytest.mark.parametrize("wants", [_read, _ask])


@WAYS
@pytest.mark.parametrize("said", GREETINGS)
async def test_a_holder_that_greets_with_nonsense_is_lost_or_refused(
    wants: Want, said: str
) -> None:
    async with _holder(GREETINGS[said], b"") as endpoint, asyncio.timeout(IN_TIME_S):
        with pytest.raises((LostError, RefusedError)):
            await wants(endpoint)


@WAYS
@pytest.mark.parametrize("said", ANSWERS)
async def test_a_holder_that_answers_nonsense_is_lost_or_refused(wants: Want, said: str) -> None:
    async with _holder(GREETING, ANSWERS[said]) as endpoint, asyncio.timeout(IN_TIME_S):
        with pytest.raises((LostError, RefusedError)):
            await wants(endpoint)


@WAYS
async def test_an_answer_to_what_is_over_ends_its_connection_and_the_next_one_is_asked(
    wants: Want,
) -> None:
    """The first answer is right, and a second one follows that nobody asked for."""
    size = BLOCK if wants is _read else ANSWER_BYTES
    answer = _data(size) + bytes(size) + _frames(ErrorFrame(1, "busy", "no"))
    async with _holder(GREETING, answer) as endpoint, asyncio.timeout(IN_TIME_S):
        await wants(endpoint)


@WAYS
@pytest.mark.parametrize("host", ["a" * 70 + ".test", "ü" * 70, "", "a..b", "x\0y"])
async def test_a_holder_whose_name_is_none_is_lost(wants: Want, host: str) -> None:
    async with asyncio.timeout(IN_TIME_S):
        with pytest.raises(LostError):
            await wants(Endpoint(host, 2**32 - 1))
