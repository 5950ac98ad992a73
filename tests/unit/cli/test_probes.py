from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

from kvmesh.cli.probes import (
    Probe,
    accepts,
    free_ports,
    http_get,
    is_free,
    is_ready,
    speaks_redis,
)
from kvmesh.core.types import Endpoint
from kvmesh.metadata.server_binary import RedisProcess, find_redis_binary


@asynccontextmanager
async def _answering(answer: Callable[[bytes], bytes]) -> AsyncIterator[Endpoint]:
    """A server that answers the first line of each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(answer(line))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])


def _http(status: str) -> Callable[[bytes], bytes]:
    return lambda line: f"HTTP/1.1 {status}\r\ncontent-length: {len(line)}\r\n\r\n".encode() + line


@pytest.mark.parametrize(("status", "ready"), [("200 OK", True), ("503 Busy", False)])
async def test_http(status: str, ready: bool) -> None:
    async with _answering(_http(status)) as endpoint:
        assert await is_ready(Probe("http", endpoint)) is ready
        code, body = await asyncio.to_thread(http_get, f"http://{endpoint}/ready")
        assert (code, body.split()[:2]) == (int(status[:3]), ["GET", "/ready"])


async def test_something_that_speaks_no_http() -> None:
    async with _answering(lambda _: b"hello\r\n") as endpoint:
        status, reason = await asyncio.to_thread(http_get, f"http://{endpoint}/")
        assert status == 0
        assert reason


@pytest.mark.parametrize(("answer", "ready"), [(b"+PONG\r\n", True), (b"-NOAUTH\r\n", False)])
async def test_redis(answer: bytes, ready: bool) -> None:
    async with _answering(lambda _: answer) as endpoint:
        assert await is_ready(Probe("redis", endpoint)) is ready


async def test_a_redis_with_a_password(tmp_path: Path) -> None:
    binary = find_redis_binary()
    assert binary is not None
    with RedisProcess(binary, folder=tmp_path) as server:
        endpoint = Endpoint("127.0.0.1", server.port)
        assert await speaks_redis(endpoint)
        async with redis.asyncio.Redis(port=server.port) as client:
            await client.config_set("requirepass", "pass-word")
        assert [
            await is_ready(Probe("redis", endpoint, password))
            for password in ("", "wrong", "pass-word")
        ] == [False, False, True]
        assert await speaks_redis(endpoint)
        async with redis.asyncio.Redis(port=server.port, password="pass-word") as client:
            await client.config_set("requirepass", "")  # for the stop of the process


@pytest.mark.parametrize("kind", ["grpc", "http", "redis"])
async def test_nobody_there(kind: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # ours, but not listening: connections are refused
        endpoint = Endpoint("127.0.0.1", bound.getsockname()[1])
        assert not await is_ready(Probe(kind, endpoint))  # type: ignore[arg-type]
        assert not await accepts(endpoint)


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert not is_free(Endpoint("127.0.0.1", listening.getsockname()[1]))


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert is_free(Endpoint("127.0.0.1", ports[0]))
