"""A real Redis Cluster of two nodes: the node with a mesh's keys is found, and found again."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from kvmesh.core.slots import Publisher
from kvmesh.core.types import WorkerId
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_store import RedisMetadataStore
from kvmesh.metadata.server_binary import find_redis_binary
from kvmesh.metadata.store import ApplyResult
from tests.waiting import until

HALF = 8192
LAST_PORT = 55_535
"""Nodes talk to each other 10,000 ports further."""

BLOCKS = bytes(range(32))


def _free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port <= LAST_PORT:
            return port


@contextlib.contextmanager
def _node(folder: Path) -> Iterator[int]:
    binary = find_redis_binary()
    assert binary is not None
    folder.mkdir()
    port = _free_port()
    settings = {"port": port, "bind": "127.0.0.1", "cluster-enabled": "yes", "save": ""}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, *flags], cwd=folder, stdout=log, stderr=log)
    try:
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    """Two nodes, each with half of the slots."""
    with _node(tmp_path / "a") as first, _node(tmp_path / "b") as second:
        made: list[Any] = [redis.Redis(port=port, protocol=2) for port in (first, second)]

        async def all_answer() -> bool:
            with contextlib.suppress(RedisError):
                return all([await each.ping() for each in made])
            return False

        async def all_agree() -> bool:
            told = [await each.execute_command("CLUSTER INFO") for each in made]
            plain = [str(each).replace("'", "").replace(" ", "") for each in told]
            return all("cluster_state:ok" in each for each in plain)

        await until(all_answer)
        await made[0].execute_command("CLUSTER ADDSLOTSRANGE", 0, HALF - 1)
        await made[1].execute_command("CLUSTER ADDSLOTSRANGE", HALF, 2 * HALF - 1)
        await made[0].execute_command("CLUSTER MEET", "127.0.0.1", second)
        await until(all_agree)
        yield made[0], made[1]
        for each in made:
            await each.aclose()


def _prefix(*, upper: bool) -> str:
    """A key prefix whose slot is on the second node, or on the first."""
    names = iter(lambda: uuid.uuid4().hex, "")
    return next(name for name in names if (key_slot(name.encode()) >= HALF) == upper)


@pytest.mark.parametrize("upper", [False, True])
async def test_a_store_works_whichever_node_has_its_keys(
    nodes: tuple[Any, Any], upper: bool
) -> None:
    port = nodes[0].connection_pool.connection_kwargs["port"]
    prefix = _prefix(upper=upper)
    client = RedisClient(RedisConfig(f"redis://127.0.0.1:{port}/0", key_prefix=prefix))
    store = RedisMetadataStore(client, lease_s=30.0)
    position = await store.position()
    slot = (await store.register(Publisher(WorkerId("a"), 1, "east", "model"))).slot
    assert await store.apply_events(slot, 1, BLOCKS, b"") is ApplyResult.APPLIED
    (match,) = await store.match("model", BLOCKS)
    assert match.num_blocks == 2
    assert await store.held(slot, 0) in ((0, BLOCKS), (0, BLOCKS[16:] + BLOCKS[:16]))
    found = await store.changes_after(position, 0.01)
    assert found is not None
    assert len(found.changes) == 2
    held = nodes[1 if upper else 0]
    assert all(key.startswith(f"{{{prefix}}}".encode()) for key in await held.keys("*"))
    assert await held.dbsize() > 0
    assert await nodes[0 if upper else 1].dbsize() == 0
    await store.close()


async def test_keys_that_moved_are_found_again(nodes: tuple[Any, Any]) -> None:
    port = nodes[0].connection_pool.connection_kwargs["port"]
    prefix = _prefix(upper=True)
    client = RedisClient(RedisConfig(f"redis://127.0.0.1:{port}/0", key_prefix=prefix))
    store = RedisMetadataStore(client, lease_s=30.0)
    await store.probe()
    slot, (here, there) = key_slot(prefix.encode()), nodes
    owner = await here.execute_command("CLUSTER MYID")
    for each in (there, here):
        await each.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)
    await store.probe()
    assert (await store.match("model", BLOCKS)) == []
    await store.close()
