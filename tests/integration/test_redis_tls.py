"""Redis with a password, behind TLS: `rediss://` and who is not let in."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio as redis

from kvmesh.cli.certs import main as make_certs
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.store import StoreUnavailableError
from tests.redis_server import redis_process

ECHO = "return {ARGV[1], ARGV[2]}"
PASSWORD = "hunter2"


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def redis_behind_tls(folder: Path) -> AsyncIterator[str]:
    """A real server behind what ends TLS in front of it; yields host and port."""
    assert make_certs(["--out", str(folder), "--services", "redis"]) == 0
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "redis.pem", folder / "redis.key")
    with redis_process(folder) as process:
        async with redis.Redis.from_url(process.url) as plain:
            await plain.config_set("requirepass", PASSWORD)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner = await asyncio.open_connection("127.0.0.1", process.port)
            await asyncio.gather(copy(reader, inner[1]), copy(inner[0], writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()


async def said(url: str, password: str) -> object:
    client = RedisClient(RedisConfig(url, password, key_prefix="t:", timeout_s=10.0))
    try:
        assert await client.ask(ECHO, "a") == await client.run(ECHO, "a")
        return await client.run(ECHO, "a")
    except StoreUnavailableError as error:
        return str(error)
    finally:
        await client.close()


async def test_redis_over_tls_with_a_password(tmp_path: Path) -> None:
    async with redis_behind_tls(tmp_path) as place:
        own = f"rediss://{place}/0?ssl_ca_certs={tmp_path / 'ca.pem'}"
        assert await said(own, PASSWORD) == [b"{t:}", b"a"]
        for password in ("wrong-one", ""):
            answer = str(await said(own, password))
            assert "Authentication" in answer, answer
            assert "wrong-one" not in answer
        # A CA of the system's, another, or one that is not there: no connection, and no plain one.
        other = tmp_path / "other"
        assert make_certs(["--out", str(other), "--services", "redis"]) == 0
        for url in (f"rediss://{place}/0", f"rediss://{place}/0?ssl_ca_certs={other / 'ca.pem'}"):
            assert "CERTIFICATE_VERIFY_FAILED" in str(await said(url, PASSWORD))
        missing = str(await said(f"rediss://{place}/0?ssl_ca_certs={other / 'none.pem'}", PASSWORD))
        assert PASSWORD not in missing
        assert isinstance(await said(f"redis://{place}/0", PASSWORD), str)
