from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvmesh.cli.findings import Finding, Level
from kvmesh.cli.probes import free_ports
from kvmesh.cli.stack_checks import check_gateway, check_members, check_redis


@asynccontextmanager
async def _answering(answer: Callable[[bytes], bytes]) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(await reader.readline()))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("status", "level", "word"),
    [
        ("200 OK", Level.OK, "ready"),
        ("503 Busy", Level.FAIL, "no decode worker"),
        ("404 No", Level.FAIL, "404"),
    ],
)
async def test_gateway(status: str, level: Level, word: str) -> None:
    body = b'{"error": {"message": "no decode worker"}}'
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with _answering(lambda _: head + body) as port:
        finding = await check_gateway(f"http://127.0.0.1:{port}/")
    assert finding.level is level
    assert word in finding.detail


async def test_a_port_that_something_else_holds() -> None:
    def answer(line: bytes) -> bytes:
        return b"+PONG\r\n" if line == b"PING\r\n" else b"-ERR\r\n"

    async with _answering(answer) as port:
        finding = await check_gateway(f"http://127.0.0.1:{port}")
    assert finding.level is Level.FAIL
    assert "a Redis" in finding.detail


async def test_a_free_port_is_fine_unless_a_gateway_was_named() -> None:
    [port] = free_ports("127.0.0.1", 1)
    url = f"http://127.0.0.1:{port}"
    assert (await check_gateway(url)).level is Level.OK
    finding = await check_gateway(url, must_run=True)
    assert finding.level is Level.FAIL
    assert "nothing listens" in finding.detail


async def test_no_url() -> None:
    assert (await check_gateway("localhost")).level is Level.FAIL


async def test_redis_that_up_would_start() -> None:
    assert (await check_redis("", Path("/bin/redis"))).level is Level.OK
    assert (await check_redis("", None)).level is Level.FAIL


async def test_redis_that_is_not_there() -> None:
    finding = await check_redis("redis://:secret@127.0.0.1:1/0", None)
    assert finding.level is Level.FAIL
    assert "secret" not in finding.detail
    assert (await check_redis("nonsense", None)).level is Level.FAIL


@pytest.mark.parametrize(
    ("said", "level", "word"),
    [
        ("redis_version:7.0.15", Level.OK, "7.0.15"),
        ("redis_version:8.0-rc1", Level.OK, "8.0-rc1"),
        ("redis_version:5.0.1", Level.FAIL, "5.0.1"),
        ("redis_version:7.0.15\r\nredis_mode:cluster", Level.OK, "7.0.15"),
        ("redis_version:7.0.15\r\nmaxmemory:9\r\nmaxmemory_policy:noeviction", Level.OK, "7.0"),
        ("redis_version:7.0.15\r\nmaxmemory:9\r\nmaxmemory_policy:allkeys-lru", Level.WARN, "lru"),
        ("redis_version:7.0.15\r\nmaxmemory:0\r\nmaxmemory_policy:allkeys-lru", Level.OK, "7.0"),
    ],
)
async def test_redis_that_runs(said: str, level: Level, word: str) -> None:
    info = f"{said}\r\n".encode()
    finding = await _asked(lambda: b"$%d\r\n%s\r\n" % (len(info), info))
    assert finding.level is level
    assert word in finding.detail
    assert (level is Level.OK) == (not finding.remedy)


async def test_redis_that_wants_a_password() -> None:
    finding = await _asked(lambda: b"-NOAUTH Authentication required.\r\n")
    assert finding.level is Level.FAIL
    assert "KVMESH_REDIS__PASSWORD" in finding.remedy


async def _asked(answer: Callable[[], bytes]) -> Finding:
    """What is found of a Redis that answers INFO so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(4096):
            for word in command.split(b"\r\n"):
                if word in (b"HELLO", b"CLIENT"):
                    writer.write(b"-ERR unknown command\r\n" if word == b"HELLO" else b"+OK\r\n")
                if word == b"INFO":
                    writer.write(answer())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await check_redis(f"redis://127.0.0.1:{port}/0?protocol=2", None)


async def test_members_of_a_running_stack() -> None:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    [nobody] = free_ports("127.0.0.1", 1)
    members = [
        {"name": "scheduler", "kind": "grpc", "address": f"127.0.0.1:{port}"},
        {"name": "decode-0", "kind": "grpc", "address": f"127.0.0.1:{nobody}"},
        {"name": "redis", "kind": "redis", "address": "127.0.0.1:1"},
    ]
    found = await check_members({"members": members}, Path("/state/logs"))
    await server.stop(grace=0)
    assert [(f.subject, f.level) for f in found] == [
        ("scheduler", Level.OK),
        ("decode-0", Level.FAIL),
    ]
    assert found[1].remedy.startswith("it has ended")
    assert found[1].remedy.endswith("see /state/logs/decode-0.log")


@pytest.mark.parametrize("url", ["http://host:port", "http://host:99999", "http://[::1"])
async def test_what_is_no_url(url: str) -> None:
    finding = await check_gateway(url)
    assert finding.level is Level.FAIL
    assert "is no URL" in finding.detail
