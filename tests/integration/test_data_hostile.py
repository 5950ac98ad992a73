"""Strangers and broken peers at a worker's data port: whatever they say, nothing of them stays.

After each of them the port has its descriptors, tasks, lanes and grants of before, no task crashed,
and who was connected all the time is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import socket
import ssl
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.frames import (
    BlockPart,
    BlockRun,
    CancelFrame,
    Checksum,
    CommitFrame,
    Frame,
    GetFrame,
    HelloFrame,
    LinkOffer,
    PullFrame,
    PullRun,
    PutFrame,
    QueryFrame,
    SegmentOffer,
)
from tests.contract.test_channels import certificate, options_of
from tests.transfer_pair import (
    BLOCK,
    DECODE,
    LAYOUT,
    PREFILL,
    Pair,
    running_pair,
    until,
    whole,
)

__all__ = ["certificate"]

HELLO = HelloFrame(PREFILL, 3, DECODE, 7, LAYOUT, LinkOffer(9, 0, Checksum.CRC32C))
RIGHT = WriteClaim(11, 7, 1, b"secret")
PUT = PutFrame(1, RIGHT, (BlockRun(0, 1),))
SPOKEN = encode_frame(HELLO) + encode_frame(PUT, BLOCK) + bytes(16)
ENDS = ("close", "reset", "half")


@pytest.fixture(params=["tcp", "tcp_tls"])
async def pair(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Pair]:
    """A port whose sender is served before and after; nothing of anybody else is left there."""
    send, receive = options_of(request.param, request)
    caplog.set_level(logging.WARNING)
    gc.collect()  # what other tests held would look like something that was closed here
    async with running_pair(send, replace(receive, stall_timeout_s=1)) as running:
        await running.pool.put(running.reservation, whole(1))
        before = _left_at(running)
        yield running
        await until(lambda: _left_at(running) == before)
        assert running.target.open_grants == []
        await running.pool.put(running.reservation, whole(2))
        assert running.sent.channels == 1, "the connection of before"
    assert caplog.messages == [], "who is nobody writes no line"


def _left_at(pair: Pair) -> tuple[int, ...]:
    server = pair.server
    return (
        len(os.listdir("/proc/self/fd")),
        len(asyncio.all_tasks()),
        len(server._serving),
        len(server._newcomers),
        len(server._state.lanes),
    )


async def _say(pair: Pair, data: bytes, end: str) -> None:
    """Connects, says something and ends the connection in one of three ways."""
    endpoint = pair.reservation.data_endpoint
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    with contextlib.suppress(OSError):
        writer.write(data)
        await writer.drain()
        if end == "half":
            writer.write_eof()
            await reader.read()
        elif end == "reset":
            linger = struct.pack("ii", 1, 0)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()


async def test_a_connection_may_end_behind_every_byte(pair: Pair) -> None:
    for length in range(len(SPOKEN) + 1):
        await _say(pair, SPOKEN[:length], ENDS[length % len(ENDS)])


def _headers() -> Iterator[bytes]:
    """Headers whose own checksum is right, with every field at its extremes."""
    types = (*range(14), 255)
    bodies = (0, 1, 28, 2**16, 2**16 + 1, 2**31, 2**32 - 1)
    payloads = (0, 1, 2**31, 2**63 - 1, 2**64 - 1)
    for kind, body, payload in itertools.product(types, bodies, payloads):
        yield _header(kind=kind, body=body, payload=payload)
    for version in (0, 2, 255):
        yield _header(version=version)
    yield _header(magic=b"KVMS")
    yield from (_header(flags=1 << bit) for bit in range(16))


def _header(
    magic: bytes = b"KVMT",
    version: int = 1,
    kind: int = 1,
    flags: int = 0,
    body: int = 0,
    payload: int = 0,
) -> bytes:
    head = struct.pack("<4sBBHIQI", magic, version, kind, flags, body, payload, 0)
    return head + struct.pack("<I", zlib.crc32(head))


def _greetings() -> Iterator[Frame]:
    for sizes in (0, 1, 2**32 - 1):
        yield replace(HELLO, layout=replace(LAYOUT, block_size=sizes, num_layers=sizes))
    for worker_id in ("", "\0", "a\nb", "é" * 512):
        yield replace(HELLO, worker_id=WorkerId(worker_id))
    for number, blocks in itertools.product((0, 2**64 - 1), (1, 2**32 - 1)):
        offer = LinkOffer(number, 65535, Checksum.NONE, blocks)
        yield replace(HELLO, incarnation=number, link=offer)
        for engine, metadata in (("", b""), ("nixl", bytes(32768)), ("cuda-ipc", bytes(74))):
            segment = SegmentOffer(engine, 2**64 - 1, metadata)
            yield replace(HELLO, link=replace(offer, segment=segment))


def _requests() -> Iterator[tuple[Frame, int]]:
    """Frames on an open channel, and the payload that each announces."""
    claims = (
        WriteClaim(2**64 - 1, 7, 2**32 - 1, b""),
        replace(RIGHT, capability=bytes(255)),
        RIGHT,
    )
    spans = ([(0, 1)], [(319, 1)], [(320, 1)], [(0, 2**32 - 1)] * 20, [(2**32 - 1, 2**32 - 1)])
    for transfer_id, claim, span in itertools.product((0, 1, 2**64 - 1), claims, spans):
        runs = tuple(BlockRun(*each) for each in span)
        num_blocks = sum(run.count for run in runs)
        yield PutFrame(transfer_id, claim, runs), num_blocks * BLOCK
        yield PutFrame(transfer_id, claim, runs, part=BlockPart(BLOCK - 1, 1)), num_blocks
        yield GetFrame(transfer_id, claim, runs), 0
        yield PullFrame(transfer_id, claim, tuple(PullRun(0, *each) for each in span)), 0
        yield CommitFrame(transfer_id, claim, 2**32 - 1, 2**32 - 1, 2**32 - 1), 0
        yield CancelFrame(transfer_id), 0
    for op, room in itertools.product((0, 1, 65535), (0, 2**32 - 1)):
        yield QueryFrame(1, op, room, bytes(16384), 64 << 20), 64 << 20


async def test_fields_may_have_any_value(pair: Pair) -> None:
    said = [
        *_headers(),
        *(encode_frame(each) for each in _greetings()),
        *(encode_frame(HELLO) + encode_frame(*each) for each in _requests()),
    ]
    for number, data in enumerate(said):
        await _say(pair, data, ENDS[number % len(ENDS)])
    written = [ok for _, ok in pair.target.ended]
    assert written.count(True) == 1, "only the sender of before has written"


async def test_nothing_is_left_of_a_thousand_damaged_greetings(pair: Pair) -> None:
    rng = random.Random(1)
    for _ in range(1000):
        data = bytearray(SPOKEN[: rng.randrange(1, len(SPOKEN))])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        await _say(pair, bytes(data), rng.choice(("close", "reset")))


async def test_a_handshake_of_tls_may_end_behind_any_byte(
    request: pytest.FixtureRequest,
) -> None:
    """By who speaks TLS well so far."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    hello = outgoing.read()
    send, receive = options_of("tcp_tls", request)
    gc.collect()
    async with running_pair(send, replace(receive, stall_timeout_s=1)) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        before = _left_at(pair)
        for length in range(0, len(hello) + 1, 7):
            await _say(pair, hello[:length], ENDS[length % len(ENDS)])
        await until(lambda: _left_at(pair) == before)
        await pair.pool.put(pair.reservation, whole(1))
