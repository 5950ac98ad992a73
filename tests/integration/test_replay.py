"""Captured bytes of a handoff are good for nothing a second time, anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from kvmesh.core.types import Endpoint
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, WorkerSection
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import FrameDecoder, PayloadStart
from kvmesh.transfer.frames import (
    CommitFrame,
    CommitOkFrame,
    ErrorFrame,
    Frame,
    HelloFrame,
    HelloOkFrame,
    PutFrame,
    PutOkFrame,
)
from tests.worker_driver import Driver, Key, driving, make_spec, running_worker, until_idle

ENGINE = EngineSection(kind="fake", num_blocks=64)
PROMPT = list(range(1, 101))


@dataclass
class Tap:
    """Somebody on the network who reads along.

    Attributes:
        heard: what was sent towards the receiver.
    """

    endpoint: Endpoint
    heard: bytearray = field(default_factory=bytearray)


@contextlib.asynccontextmanager
async def tapped(to: Endpoint) -> AsyncIterator[Tap]:
    tasks: set[asyncio.Task[None]] = set()

    async def pass_on(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray | None
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if heard is not None:
                    heard += data
                writer.write(data)
        finally:
            await _closed(writer)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(to.host, to.port)
        for each in (
            pass_on(reader, far_writer, tap.heard),
            pass_on(far_reader, writer, None),
        ):
            tasks.add(asyncio.ensure_future(each))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    tap = Tap(Endpoint("127.0.0.1", server.sockets[0].getsockname()[1]))
    try:
        yield tap
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def _endpoint(worker: Worker) -> Endpoint:
    endpoint = worker.decode.arriving.data_endpoint
    assert endpoint is not None, "listening"
    return endpoint


def _block_bytes(worker: Worker) -> int:
    return int(worker._runner.kv.read_view(0, 1).nbytes)


def _contents(worker: Worker) -> str:
    return hashlib.sha256(worker._runner.kv.read_view(0, ENGINE.num_blocks)).hexdigest()


async def say(worker: Worker, data: bytes) -> list[Frame]:
    """Says it on a connection of its own; what the worker answers until it has all been read."""
    endpoint = _endpoint(worker)
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(data)
    writer.write_eof()
    decoder = FrameDecoder(_block_bytes(worker))
    found: list[Frame] = []
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(20):
            while answer := await reader.read(decoder.wanted):
                found.extend(cast("Frame", event) for event in decoder.feed(answer))
    await _closed(writer)
    return found


def claims_in(data: bytes, block_bytes: int) -> list[PutFrame | CommitFrame]:
    """The frames of a capture that claim a reservation."""
    events = FrameDecoder(block_bytes).feed(data)
    frames = [each.frame if isinstance(each, PayloadStart) else each for each in events]
    return [frame for frame in frames if isinstance(frame, PutFrame | CommitFrame)]


@pytest.fixture
async def decode() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="d0", role="decode"), ENGINE) as worker:
        yield worker


async def captured(prefill: Worker, decode: Worker, driver: Driver) -> bytes:
    """All that a handoff sent, from its greeting to its commit."""
    spec = make_spec(PROMPT, max_tokens=4)
    key = Key("victim")
    reserved = await driver.reserve(decode, key, spec)
    message = reserved.reserved
    async with tapped(_endpoint(decode)) as tap:
        message.data_endpoint.port = tap.endpoint.port
        message.ClearField("host_route")
        accepted = await driver.offer(prefill, key, spec, message)
        assert accepted.WhichOneof("event") == "accepted", accepted
        while (await driver.prefill_event(key)).WhichOneof("event") != "handed_off":
            pass
        while not (await driver.decode_event(key)).tokens.finish_reason:
            pass
        await until_idle(prefill, decode)
        return bytes(tap.heard)


@pytest.fixture
async def capture(decode: Worker) -> bytes:
    section = WorkerSection(id="p0", role="prefill", channels="tcp")
    async with running_worker(section, ENGINE) as prefill, driving(prefill, decode) as driver:
        data = await captured(prefill, decode, driver)
    claims = claims_in(data, _block_bytes(decode))
    assert {type(frame) for frame in claims} == {PutFrame, CommitFrame}
    return data


def _reasons(frames: list[Frame]) -> set[str]:
    known = HelloOkFrame | PutOkFrame | CommitOkFrame | ErrorFrame
    assert all(isinstance(each, known) for each in frames)
    return {each.reason for each in frames if isinstance(each, ErrorFrame)}


def _greeting(worker: Worker) -> bytes:
    layout = worker._runner.spec.layout
    hello = HelloFrame(worker.worker_id, 1, worker.worker_id, worker.incarnation, layout)
    return encode_frame(hello)


async def test_a_handoff_that_is_said_again_writes_nothing(decode: Worker, capture: bytes) -> None:
    before = _contents(decode)
    claims = claims_in(capture, _block_bytes(decode))
    put = next(each for each in claims if isinstance(each, PutFrame))
    size = put.num_blocks * _block_bytes(decode)
    altered = encode_frame(replace(put, checksum=False), size) + b"x" * size
    # Within a lease the worker answers PUT_OK: a sender may repeat a piece after a lost connection.
    for data in (capture, _greeting(decode) + altered):
        assert _reasons(await say(decode, data)) == set()
        assert _contents(decode) == before
    decode.decode.arriving._handoff.expire(math.inf)
    for data in (capture, _greeting(decode) + altered):
        assert _reasons(await say(decode, data)) == {"stale"}
        assert _contents(decode) == before
    await until_idle(decode)


async def test_a_capability_is_for_its_reservation_alone(decode: Worker, capture: bytes) -> None:
    """Whoever heard one writes into no other reservation, be it open or ended."""
    async with driving(decode) as driver:
        key, spec = Key("another"), make_spec([each + 500 for each in PROMPT], max_tokens=4)
        reserved = (await driver.reserve(decode, key, spec)).reserved
        before = _contents(decode)
        claims = claims_in(capture, _block_bytes(decode))
        put = next(each for each in claims if isinstance(each, PutFrame))
        commit = next(each for each in claims if isinstance(each, CommitFrame))
        stolen = replace(put.claim, reservation_id=reserved.reservation_id)
        own = replace(stolen, capability=bytes(reserved.capability))
        hello = _greeting(decode)
        for claim, reason in (
            (stolen, "invalid"),
            (replace(own, generation=own.generation + 1), "stale"),
            (replace(own, incarnation=own.incarnation - 1), "stale"),
        ):
            size = put.num_blocks * _block_bytes(decode)
            bad_put = encode_frame(replace(put, claim=claim, checksum=False), size) + bytes(size)
            for data in (bad_put, encode_frame(replace(commit, claim=claim))):
                assert _reasons(await say(decode, hello + data)) == {reason}, claim
        assert _contents(decode) == before
        driver.cancel_decode(decode, key)
        await until_idle(decode)
        # Of a reservation that has ended not even the right capability is good.
        data = hello + encode_frame(replace(commit, claim=own))
        assert _reasons(await say(decode, data)) == {"stale"}
        await until_idle(decode)


async def test_another_worker_and_another_life_of_the_same_turn_a_captured_greeting_away(
    capture: bytes,
) -> None:
    for name in ("d0", "d1"):
        async with running_worker(WorkerSection(id=name, role="decode"), ENGINE) as worker:
            before = _contents(worker)
            assert _reasons(await say(worker, capture)) == {"identity"}
            assert _contents(worker) == before
            await until_idle(worker)
