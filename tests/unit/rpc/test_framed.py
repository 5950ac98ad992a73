"""Frames on one socket, cut anywhere, and what is no frame."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kvmesh.core.errors import ProtocolError
from kvmesh.rpc.framed import FramedConnection, ignore
from kvmesh.v1.kv_manager_service_pb2 import MatchPrefixRequest


class Wire:
    """What a connection uses of a transport."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def connected(frames: list[bytes], max_bytes: int = 100) -> tuple[FramedConnection, Wire]:
    connection, wire = FramedConnection(frames.append, max_bytes), Wire()
    transport: Any = wire
    connection.connection_made(transport)
    return connection, wire


async def test_frames_arrive_whole_wherever_the_bytes_are_cut() -> None:
    sender, wire = connected([])
    messages = [MatchPrefixRequest(namespace="n" * n) for n in (0, 1, 60)]
    sender.send(messages)
    for size in (1, 2, 3, 5, 7, 64, len(wire.written)):
        frames: list[bytes] = []
        receiver, _ = connected(frames)
        for at in range(0, len(wire.written), size):
            receiver.data_received(wire.written[at : at + size])
        assert [MatchPrefixRequest.FromString(frame) for frame in frames] == messages


@pytest.mark.parametrize("cut", [4, 1])
async def test_a_frame_that_is_too_long_ends_the_connection(cut: int) -> None:
    frames: list[bytes] = []
    connection, wire = connected(frames, max_bytes=9)
    data = (10).to_bytes(4, "little")
    connection.data_received(data[:cut])
    connection.data_received(data[cut:] + b"x")
    assert wire.aborted
    assert isinstance(connection.failure, ProtocolError)
    assert "10 bytes" in connection.closed.result()
    assert frames == []


async def test_a_frame_that_is_no_message_ends_the_connection() -> None:
    def parse(frame: bytes) -> None:
        raise DecodeError("cannot be read")

    connection, wire = connected([])
    connection.on_frame = parse
    connection.data_received(b"\1\0\0\0x")
    assert wire.aborted
    assert connection.failure is not None
    assert connection.failure.reason == "damaged_message"


async def test_a_fault_of_ours_is_reported_and_ends_the_connection_on_both_sides() -> None:
    loop, reported = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context.get("exception")))
    fault = RuntimeError("a fault of ours")

    def on_frame(_: bytes) -> None:
        raise fault

    here, there = socket.socketpair()
    _, faulty = await loop.create_connection(lambda: FramedConnection(on_frame, 100), sock=here)
    _, peer = await loop.create_connection(lambda: FramedConnection(ignore, 100), sock=there)
    peer.send([MatchPrefixRequest(namespace="one"), MatchPrefixRequest(namespace="two")])
    assert await faulty.closed == "a fault of ours"
    assert await peer.closed
    assert reported == [fault]
    assert faulty.failure is None, "the peer did nothing wrong"


async def test_after_the_end_nothing_is_sent_and_the_reason_stays() -> None:
    connection, wire = connected([])
    connection.connection_lost(OSError("reset"))
    connection.connection_lost(None)
    connection.send([MatchPrefixRequest(namespace="n")])
    connection.close()
    connection.abort()
    assert wire.written == b""
    assert not wire.aborted
    assert await asyncio.wait_for(connection.closed, 10) == "reset"
