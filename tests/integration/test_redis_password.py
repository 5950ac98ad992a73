"""A Redis that asks for a password, which is in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio

from kvmesh.core.errors import ConfigError
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.store import StoreUnavailableError
from tests.redis_server import redis_process


async def answers(config: RedisConfig) -> bool:
    """Whether both ways to Redis are let in: the pool's, and the one line for many questions."""
    client = RedisClient(config)
    try:
        script = "return ARGV[1]"
        return [await client.run(script), await client.ask(script)] == [b"{p:}", b"{p:}"]
    finally:
        await client.close()


async def test_a_password_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("pass-word\n")
    with redis_process(tmp_path) as server:
        async with redis.asyncio.Redis(port=server.port) as admin:
            await admin.config_set("requirepass", "pass-word")
        own = RedisConfig(server.url, key_prefix="p:", password_file=str(file))
        assert await answers(own)
        with pytest.raises(StoreUnavailableError, match="Authentication"):
            await answers(RedisConfig(server.url, key_prefix="p:"))
    with pytest.raises(ConfigError, match=r"redis\.password_file .*nothing: No such file"):
        RedisClient(RedisConfig(server.url, password_file=str(tmp_path / "nothing")))
