"""Real Redis servers for tests: `redis_url` for state, `redis_process` for tests that kill it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmesh.core.config import environment
from kvmesh.metadata.server_binary import RedisProcess, find_redis_binary


@contextmanager
def redis_process(folder: Path | None = None, port: int = 0) -> Iterator[RedisProcess]:
    """A server of the test's own on a free port; `stop(kill=True)` and `start` it as you like."""
    binary = find_redis_binary()
    assert binary is not None, "no Redis server: install redis-server, or the pip extra `local`"
    with RedisProcess(binary, port, folder) as process:
        yield process


@contextmanager
def redis_url(folder: Path | None = None) -> Iterator[str]:
    """URL of the server in KVMESH_REDIS_URL, else of one that lives as long as the block.

    The server may be shared: use a key prefix of your own, and do not flush it.
    """
    url = environment("KVMESH_REDIS_URL")
    if url:
        yield url
        return
    with redis_process(folder) as process:
        yield process.url
