"""Ports with TLS under floods of those who say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from kvmesh.cli.certs import main as make_certs
from kvmesh.core.newcomers import MAX_NEWCOMERS
from kvmesh.rpc import listening_port
from kvmesh.rpc.channels import PeerTls
from kvmesh.rpc.direct import DirectListener
from kvmesh.rpc.listening_port import ListeningPort
from kvmesh.rpc.tls import client_context, server_context
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.data_server import ReceiveOptions
from kvmesh.transfer.tls import DataTls
from tests.transfer_pair import running_pair, whole
from tests.waiting import until

LONG_S = 60.0
"""Nobody is cut for being slow within a test."""

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> PeerTls:
    folder = tmp_path_factory.mktemp("certs")
    arguments = ("--services", "decode", "--hosts", "127.0.0.1,localhost")
    assert make_certs(["--out", str(folder), *arguments]) == 0
    pem, key = str(folder / "decode.pem"), str(folder / "decode.key")
    return PeerTls(pem, key, str(folder / "ca.pem"))


def contexts(files: PeerTls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a server and a client."""
    inside, outside = server_context(files, "test"), client_context(files, "test")
    assert inside is not None
    assert outside is not None
    return inside, outside


class Echo(asyncio.Protocol):
    """Says everything once more."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def is_cut(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


@contextlib.asynccontextmanager
async def silence(port: int, count: int) -> AsyncIterator[list[Ends]]:
    ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        yield ends
    finally:
        for _, writer in ends:
            writer.close()


async def flood(files: PeerTls, turned_away: list[object]) -> None:
    """Of too many handshakes the oldest is cut; who speaks TLS is served, before and after."""
    inside, outside = contexts(files)
    server = ListeningPort(inside, LONG_S, lambda _: Echo(), turned_away.append, limit=3)
    port = await server.start("127.0.0.1", 0)

    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"

    known = await asyncio.open_connection("127.0.0.1", port, ssl=outside)
    await hello(*known)
    async with silence(port, 8) as ends:
        for reader, _ in ends[:5]:
            await is_cut(reader)
        await hello(*known)
        other = await asyncio.open_connection("127.0.0.1", port, ssl=outside)
        await hello(*other)
        await is_cut(ends[5][0])
        server.close()
        server.close()
        for reader, _ in ends[6:]:
            await is_cut(reader)
        await hello(*other)  # connections that stand go on
    for _, writer in (known, other):
        writer.close()
        await writer.wait_closed()
    assert len(turned_away) == 8
    assert server.num_greeting == 0


async def test_of_too_many_handshakes_the_oldest_is_cut(files: PeerTls) -> None:
    await flood(files, [])


def test_handshakes_are_cut_on_the_loop_of_services(files: PeerTls) -> None:
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: errors.append(each))
        await flood(files, [])

    uvloop.run(run())
    assert errors == []


async def test_a_handshake_that_takes_long_or_is_none_is_cut(files: PeerTls) -> None:
    inside, _ = contexts(files)
    away: list[object] = []
    server = ListeningPort(inside, 0.05, lambda _: Echo(), away.append)
    async with silence(await server.start("localhost", 0), 2) as ends:
        ends[0][1].write(b"GET / HTTP/1.1\r\n\r\n")
        for reader, _ in ends:
            assert b"200" not in await reader.read()
        await until(lambda: len(away) == 2, "both are turned away")
    server.close()


async def test_who_is_not_wanted_gets_no_handshake(files: PeerTls) -> None:
    inside, _ = contexts(files)
    asked: list[str] = []

    def come(address: str) -> None:
        asked.append(address)

    server = ListeningPort(inside, LONG_S, come)
    async with silence(await server.start("127.0.0.1", 0), 1) as ends:
        await is_cut(ends[0][0])
    assert asked == ["127.0.0.1"]
    server.close()


async def test_without_descriptors_the_port_rests_and_goes_on(
    files: PeerTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = contexts(files)
    server = ListeningPort(inside, LONG_S, lambda _: Echo())
    tries: list[int] = []
    accept = socket.socket.accept

    def full(self: socket.socket) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    port = await server.start("127.0.0.1", 0)
    monkeypatch.setattr(listening_port, "ACCEPT_PAUSE_S", 0.01)
    monkeypatch.setattr(socket.socket, "accept", full)
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=outside)
    assert len(tries) == 3  # the last one finds nobody waiting
    writer.close()
    await writer.wait_closed()
    server.close()


async def test_a_direct_port_holds_no_more_handshakes_than_newcomers(files: PeerTls) -> None:
    listener = DirectListener(tls=files)
    await listener.start()
    async with silence(listener.port, MAX_NEWCOMERS + 2) as ends:
        for reader, _ in ends[:2]:
            await is_cut(reader)
        assert isinstance(listener._server, ListeningPort)
        assert listener._server.num_greeting <= MAX_NEWCOMERS
        await listener.close()


async def test_handshakes_on_a_data_port_give_way_too(files: PeerTls) -> None:
    inside, outside = contexts(files)
    send = SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=LONG_S, tls=DataTls(outside))
    receive = ReceiveOptions(stall_timeout_s=LONG_S, tls=DataTls(inside))
    async with running_pair(send, receive) as pair:
        await pair.pool.put(pair.reservation, whole(1))
        newcomers = pair.server._newcomers
        newcomers._limit = 3
        async with silence(pair.reservation.data_endpoint.port, 5) as ends:
            for _, writer in ends:
                writer.write(b"\x16\x03\x01")  # the beginning of a handshake
            for reader, _ in ends[:2]:
                await is_cut(reader)
            await pair.pool.put(pair.reservation, whole(1))
        assert pair.sent.channels == 1  # the same channel
        await until(lambda: not len(newcomers), "nobody waits")


def test_one_turn_of_the_loop_takes_in_all_who_wait() -> None:
    waiting, most_turns = 100, 10

    async def run() -> int:
        made: list[asyncio.BaseTransport] = []

        class Made(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.append(transport)

        server = ListeningPort(None, LONG_S, lambda _: Made())
        port = await server.start("127.0.0.1", 0, backlog=waiting)
        with contextlib.ExitStack() as stack:
            for _ in range(waiting):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            turns = 0
            while len(made) < waiting:
                turns += 1
                await asyncio.sleep(0)
            server.close()
            assert all(each.get_extra_info("socket").getsockopt(6, 1) for each in made)
        return turns

    # One in each turn is what uvloop's own servers do.
    assert uvloop.run(run()) <= most_turns
