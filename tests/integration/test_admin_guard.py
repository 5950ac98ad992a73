"""Callers of the admin port without a token cannot keep others out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from kvmesh.runtime.admin import AdminPort
from kvmesh.runtime.admin_config import AdminConfig
from kvmesh.runtime.admin_guard import AdminGuard

TOKEN = "a-token-of-the-operators"
BEARER = {"Authorization": f"Bearer {TOKEN}"}

HALF = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX: "
OPEN = b"GET /open HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.asynccontextmanager
async def admin_port(guard: AdminGuard) -> AsyncIterator[AdminPort]:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="hello")

    admin = AdminPort(AdminConfig(port=0, token=TOKEN))
    admin.guard = guard
    admin.route("GET", "/metrics", answer)
    admin.route("GET", "/open", answer, needs_token=False)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def _say(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def _ended(reader: asyncio.StreamReader) -> bytes:
    """What came before the end."""
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("before", [b"", b"\r\n\r\n"])
async def test_headers_that_do_not_come_are_not_waited_for(before: bytes) -> None:
    async with admin_port(AdminGuard(header_timeout_s=0.05)) as admin:
        reader, writer = await _say(admin.port, before + HALF)
        assert await _ended(reader) == b""
        writer.close()
        assert len(admin.guard.newcomers) == 0


@pytest.mark.parametrize("data", [HALF, OPEN])
async def test_a_flood_without_a_token_does_not_keep_the_operator_out(data: bytes) -> None:
    async with admin_port(AdminGuard(limit=4)) as admin:
        url = f"http://127.0.0.1:{admin.port}"
        async with aiohttp.ClientSession(url, headers=BEARER) as session:
            async with session.get("/metrics") as answer:
                assert answer.status == 200
            flood = [await _say(admin.port, data) for _ in range(8)]
            ended = await asyncio.gather(*(_ended(reader) for reader, _ in flood[:4]))
            assert len(ended) == 4
            assert len(admin.guard.newcomers) == 4
            # On the connection that was let in, which the flood did not cut.
            async with session.get("/metrics") as answer:
                assert answer.status == 200
            async with (
                aiohttp.ClientSession(url, headers=BEARER) as another,
                another.get("/metrics") as answer,
            ):
                assert answer.status == 200
            for _, writer in flood:
                writer.close()


async def test_what_is_not_http_is_told_neither_versions_nor_its_own_bytes() -> None:
    async with admin_port(AdminGuard()) as admin:
        reader, writer = await _say(admin.port, b"secret-bytes are no HTTP\r\n\r\n")
        head, _, body = (await _ended(reader)).partition(b"\r\n\r\n")
        writer.close()
    assert head.split()[1] == b"400"
    assert b"Server: kvmesh\r\n" in head + b"\r\n"
    assert json.loads(body)["error"]["code"] == 400
    assert not any(word in head + body for word in (b"aiohttp", b"Python", b"secret-bytes"))
