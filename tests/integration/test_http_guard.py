"""Clients that are slow, greedy or rude at the gateway's HTTP port, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvmesh.cli.certs import main as make_certs
from kvmesh.rpc.channels import TlsConfig
from kvmesh.rpc.listening_port import ListeningPort
from kvmesh.runtime.http_connection import HttpProtocol
from services.gateway.config import HttpConfig
from services.gateway.fronts.http import HttpFront
from services.gateway.fronts.http_guard import ConnectionGuard
from services.gateway.metrics import GatewayMetrics
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack

BODY = json.dumps({"model": MODEL, "prompt": "one", "max_tokens": 4}).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@contextlib.asynccontextmanager
async def guarded(folder: Path, **http: Any) -> AsyncIterator[Stack]:
    config = HttpConfig(port=0, max_body_bytes=1 << 16, **http)
    async with gateway_stack(folder, http=config) as stack:
        yield stack


async def connect(stack: Stack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", stack.gateway.http_port)


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Waits for the end of a connection; whether nothing was answered on it."""
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


def num_cut(stack: Stack, reason: str) -> float:
    return stack.gateway.metrics.value("kvmesh_gateway_connections_cut_total", reason=reason)


async def all_closed(stack: Stack) -> None:
    metrics = stack.gateway.metrics
    await stack.mesh.until(lambda: metrics.value("kvmesh_gateway_connections") == 0)


async def ask(stack: Stack) -> int:
    async with (
        aiohttp.ClientSession(stack.url) as session,
        session.post("/v1/completions", data=BODY) as answer,
    ):
        return answer.status


async def test_slow_headers_are_cut_and_do_not_stop_others(tmp_path: Path) -> None:
    async with guarded(tmp_path, header_timeout_s=0.3) as stack:
        slow = [await connect(stack) for _ in range(50)]

        async def drip(writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                for byte in b"\r\n\r\n" + HEAD * 1000:  # empty lines before are no headers
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.02)

        drips = [asyncio.create_task(drip(writer)) for _, writer in slow]
        assert await ask(stack) == 200
        assert all(await asyncio.gather(*(is_cut(reader) for reader, _ in slow)))
        assert num_cut(stack, "slow_headers") == 50
        assert await ask(stack) == 200
        for task in drips:
            task.cancel()
        await asyncio.wait(drips)
        for _, writer in slow:
            writer.close()
        await stack.mesh.until(
            lambda: stack.gateway.metrics.value("kvmesh_gateway_connections") == 0
        )


async def test_headers_in_many_pieces_are_fine_in_time(tmp_path: Path) -> None:
    async with guarded(tmp_path) as stack:
        reader, writer = await connect(stack)
        for byte in HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode():
            writer.write(bytes([byte]))
            await writer.drain()
        writer.write(BODY)
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_a_slow_body_gets_408(tmp_path: Path) -> None:
    async with guarded(tmp_path, body_timeout_s=0.2) as stack:
        reader, writer = await connect(stack)
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n{")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ") or answer == b""
        assert await ask(stack) == 200
        writer.close()
        await stack.idle()


async def test_an_idle_connection_is_closed(tmp_path: Path) -> None:
    async with guarded(tmp_path, idle_timeout_s=0.2) as stack:
        reader, writer = await connect(stack)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        await reader.read()  # to the end
        writer.close()


@pytest.mark.parametrize(
    "first", [HEAD + LENGTH + BODY, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_headers_that_drip_behind_a_good_request_are_idle(
    tmp_path: Path, first: bytes
) -> None:
    """Whoever read the first request: the header limit is over, the idle limit is not."""
    async with guarded(tmp_path, idle_timeout_s=0.3) as stack:
        reader, writer = await connect(stack)
        writer.write(first + b"GET /health HTTP/1.1\r\n")

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b"X: y\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert (await reader.read()).count(b" 200 OK\r\n") == 1  # and then the end
        dripping.cancel()
        await asyncio.wait([dripping])
        writer.close()
        await all_closed(stack)


async def test_connections_of_one_address_are_bounded(tmp_path: Path) -> None:
    async with guarded(tmp_path, max_connections_per_address=3) as stack:
        held = [await connect(stack) for _ in range(3)]
        for reader, writer in held:  # let in, not only queued by the kernel
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await reader.readline()
        reader, writer = await connect(stack)
        assert await is_cut(reader)
        assert num_cut(stack, "address") == 1
        writer.close()
        # Somebody else is let in.
        reader, other = await asyncio.open_connection(
            "127.0.0.1", stack.gateway.http_port, local_addr=("127.0.0.2", 0)
        )
        other.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        for writer in (other, *(writer for _, writer in held)):
            writer.close()
        await stack.mesh.until(
            lambda: stack.gateway.metrics.value("kvmesh_gateway_connections") == 0
        )


@pytest.mark.parametrize("raw", [HEAD + LENGTH + BODY, b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_connections_with_requests_are_bounded_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: bytes
) -> None:
    held = asyncio.Event()
    wait_for_it(monkeypatch, held)
    async with guarded(tmp_path, max_connections=1) as stack:
        stack.mesh.go.clear()
        reader, writer = await connect(stack)
        writer.write(raw)
        await stack.mesh.until(lambda: held.is_set() or bool(stack.mesh.workers["d1"].running))
        refused, other = await connect(stack)
        assert await is_cut(refused)
        assert num_cut(stack, "full") == 1
        stack.mesh.go.set()
        held.clear()
        assert b"HTTP/1.1 " in await reader.readline(), "the one that is served goes on"
        other.close()
        writer.close()


def wait_for_it(monkeypatch: pytest.MonkeyPatch, held: asyncio.Event) -> None:
    """Makes aiohttp's answer to an unknown path wait; sets the event when one waits."""
    errors = HttpFront._errors

    async def waiting(self: HttpFront, request: Any, handler: Any) -> Any:
        if request.path == "/x":
            held.set()
            while held.is_set():
                await asyncio.sleep(0.01)
        return await errors(self, request, handler)

    monkeypatch.setattr(HttpFront, "_errors", web.middleware(waiting))


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nX: ", HEAD + b"Content-Length: 9\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
async def test_a_full_port_takes_new_clients_in_place_of_the_oldest_silent_one(
    tmp_path: Path, sent: bytes
) -> None:
    async with guarded(tmp_path, max_connections=4) as stack:
        silent = []
        for _ in range(4):
            silent.append(await connect(stack))
            silent[-1][1].write(sent)
            count = float(len(silent))
            metrics = stack.gateway.metrics
            await stack.mesh.until(lambda: metrics.value("kvmesh_gateway_connections") == count)  # noqa: B023
        for already in range(3):
            assert await ask(stack) == 200
            assert num_cut(stack, "gave_way") == 1, "one connection makes room for all that follow"
            assert already <= 3
        assert await is_cut(silent[0][0]), "the oldest"
        for _, writer in silent:
            writer.close()
        await all_closed(stack)


async def test_an_idle_connection_gives_way_when_none_is_silent(tmp_path: Path) -> None:
    async with guarded(tmp_path, max_connections=2) as stack:
        idle = []
        for _ in range(2):
            reader, writer = await connect(stack)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"}")
            idle.append((reader, writer))
        # The first one asks again: the second one is idle for longest now.
        idle[0][1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await idle[0][0].readuntil(b"}")
        assert await ask(stack) == 200
        assert await is_cut(idle[1][0])
        assert not idle[0][0].at_eof()
        assert num_cut(stack, "gave_way") == 1
        for _, writer in idle:
            writer.close()
        await all_closed(stack)


@pytest.mark.parametrize("takes", [0, 1500])
async def test_a_client_that_takes_hardly_anything_is_cut(takes: int) -> None:
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[BaseException | None] = loop.create_future()

    class Sender(HttpProtocol):
        """Sends more than sockets hold."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(bytes(64 << 20))

        def connection_lost(self, exc: Exception | None) -> None:
            lost.set_result(exc)

    guard = ConnectionGuard(HttpConfig(stall_timeout_s=1.0), GatewayMetrics())
    server = ListeningPort(None, 1.0, guard.wrap(Sender), guard.turned_away)
    port = await server.start("127.0.0.1", 0)
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        while not lost.done():
            with contextlib.suppress(BlockingIOError, ConnectionError):
                client.recv(takes)  # less room than a segment is no progress
            await asyncio.sleep(0.3)
        assert isinstance(await lost, (TimeoutError, ConnectionError))
        assert guard.num_open == 0
    server.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Content-Length: 99999999\r\n\r\n",
    ],
)
async def test_what_is_no_request_gets_4xx_or_nothing(tmp_path: Path, raw: bytes) -> None:
    async with guarded(tmp_path, header_timeout_s=0.5, body_timeout_s=0.5) as stack:
        reader, writer = await connect(stack)
        writer.write(raw)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), answer[:80]
        writer.close()
        assert await ask(stack) == 200


async def test_tls_on_the_public_port(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path)]) == 0
    tls = TlsConfig(str(tmp_path / "public.pem"), str(tmp_path / "public.key"))
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with guarded(tmp_path, tls=tls, header_timeout_s=0.5) as stack:
        url = stack.url.replace("http:", "https:")
        async with aiohttp.ClientSession(url) as session:
            async with session.post("/v1/completions", data=BODY, ssl=trusted) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.post("/v1/completions", data=BODY)
        # Neither plain text nor half a handshake gets anywhere.
        reader, writer = await connect(stack)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in await reader.read()
        writer.close()


async def test_connections_count_while_tls_is_not_through(tmp_path: Path) -> None:
    assert make_certs(["--out", str(tmp_path)]) == 0
    tls = TlsConfig(str(tmp_path / "public.pem"), str(tmp_path / "public.key"))
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with guarded(tmp_path, tls=tls, max_connections_per_address=2) as stack:
        metrics = stack.gateway.metrics
        silent = [await connect(stack) for _ in range(2)]
        await stack.mesh.until(lambda: metrics.value("kvmesh_gateway_connections") == 2)
        reader, surplus = await connect(stack)
        assert await is_cut(reader)
        assert num_cut(stack, "address") == 1
        for writer in (surplus, *(writer for _, writer in silent)):
            writer.close()
        await all_closed(stack)
        # All of the limit is there for those whose handshake is through.
        url = stack.url.replace("http:", "https:")
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            answers = [await session.get("/health") for _ in range(2)]
            held = [session.post("/v1/completions", data=BODY) for _ in range(2)]
            codes = [each.status for each in (*answers, *await asyncio.gather(*held))]
            assert codes == [200] * 4
        assert num_cut(stack, "address") == 1
        await all_closed(stack)


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/responses", b"/tokenize"])
async def test_a_body_that_is_too_long_is_refused_before_it_is_sent(
    tmp_path: Path, path: bytes, more: bytes
) -> None:
    async with guarded(tmp_path) as stack:
        reader, writer = await connect(stack)
        head = HEAD.replace(b"/v1/completions", path)
        writer.write(head + more + b"Content-Length: %d\r\n\r\n" % ((1 << 16) + 1))
        answer = await reader.readuntil(b"}}")
        assert b"HTTP/1.1 413 " in answer
        assert b"the body is longer than 65536 bytes" in answer
        writer.close()
        await all_closed(stack)


async def test_both_ways_to_the_api_refuse_too_many_headers(tmp_path: Path) -> None:
    """Plain requests and others are read by different readers."""
    async with guarded(tmp_path) as stack:
        for odd in (b"", b"Connection: close\r\n"):
            for count, status in ((60, b"200"), (200, b"400")):
                reader, writer = await connect(stack)
                headers = b"".join(b"X-%d: y\r\n" % number for number in range(count))
                writer.write(HEAD + odd + headers + LENGTH + BODY)
                assert (await reader.readline()).split()[1] == status, (odd, count)
                writer.close()
