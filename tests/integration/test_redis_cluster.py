"""A real Redis Cluster of two nodes: the node with a mesh's keys is found, and found again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from kvmesh.core.slots import Publisher
from kvmesh.core.types import WorkerId
from kvmesh.metadata.redis_client import RedisClient, RedisConfig
from kvmesh.metadata.redis_fleet import RedisFleetStore
from kvmesh.metadata.redis_store import RedisMetadataStore
from kvmesh.metadata.server_binary import find_redis_binary, free_port
from kvmesh.metadata.store import ApplyResult, StoreUnavailableError
from tests.waiting import until

NUM_SLOTS = 16_384
HALF = NUM_SLOTS // 2
DOWN_MS = 500
"""A node that is silent for so long is down."""

RECOVERED_S = 2.0
BLOCKS = bytes(range(32))


@dataclass
class Node:
    """A server of a cluster."""

    port: int
    bus_port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> Any:
        return redis.Redis(port=self.port, protocol=2)

    async def tell(self, *words: str | int) -> str:
        """What it answers to a command, as plain text."""
        async with self.client() as client:
            told = await client.execute_command(" ".join(map(str, words[:2])), *words[2:])
        return str(told).replace("'", "").replace(" ", "")


@contextlib.contextmanager
def _node(folder: Path) -> Iterator[Node]:
    binary = find_redis_binary()
    assert binary is not None
    folder.mkdir()
    # By default nodes talk on a port above 30,000, which any connection may have already.
    port, bus_port = free_port(), free_port()
    settings = {"port": port, "bind": "127.0.0.1", "cluster-enabled": "yes", "save": ""}
    settings |= {"cluster-port": bus_port}
    settings |= {"cluster-node-timeout": DOWN_MS, "repl-diskless-sync-delay": 0}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, *flags], cwd=folder, stdout=log, stderr=log)
    try:
        yield Node(port, bus_port, process)
    finally:
        process.kill()
        process.wait()


async def _join(masters: Sequence[Node], share: int) -> None:
    """Makes a cluster in which each node has `share` slots, and the last one the rest."""

    async def all_answer() -> bool:
        with contextlib.suppress(RedisError):
            return all([await each.tell("PING") for each in masters])
        return False

    async def all_agree() -> bool:
        told = [await each.tell("CLUSTER", "INFO") for each in masters]
        return all(
            "cluster_state:ok" in each and f"cluster_size:{len(masters)}" in each for each in told
        )

    await until(all_answer)
    for number, each in enumerate(masters):
        last = NUM_SLOTS if each is masters[-1] else (number + 1) * share
        await each.tell("CLUSTER", "ADDSLOTSRANGE", number * share, last - 1)
        if number:
            await masters[0].tell("CLUSTER", "MEET", "127.0.0.1", each.port, each.bus_port)
    await until(all_agree)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    """Two nodes, each with half of the slots."""
    with _node(tmp_path / "a") as first, _node(tmp_path / "b") as second:
        await _join((first, second), HALF)
        async with first.client() as one, second.client() as other:
            yield one, other


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


@pytest.mark.parametrize("is_first", [False, True], ids=["another node", "the node of the URL"])
async def test_keys_are_found_after_their_node_was_lost(tmp_path: Path, is_first: bool) -> None:
    async with AsyncExitStack() as stack:
        masters = [stack.enter_context(_node(tmp_path / f"{number}")) for number in range(3)]
        replica = stack.enter_context(_node(tmp_path / "replica"))
        await _join(masters, NUM_SLOTS // 3)
        await replica.tell("CLUSTER", "MEET", "127.0.0.1", masters[0].port, masters[0].bus_port)
        prefix = _prefix(upper=True)
        while not NUM_SLOTS // 3 <= key_slot(prefix.encode()) < 2 * (NUM_SLOTS // 3):
            prefix = _prefix(upper=True)
        owner = masters[1]
        name = (await owner.tell("CLUSTER", "MYID")).lstrip("b")

        async def is_replica() -> bool:
            with contextlib.suppress(RedisError):  # it has not heard of that node yet
                await replica.tell("CLUSTER", "REPLICATE", name)
                return True
            return False

        async def follows() -> bool:
            return "master_link_status:up" in await replica.tell("INFO", "replication")

        async def knows_slots() -> bool:
            return f"cluster_slots_assigned:{NUM_SLOTS}" in await replica.tell("CLUSTER", "INFO")

        await until(is_replica)
        await until(follows)  # asking to replicate again would begin the copy anew
        await until(knows_slots)  # it takes nobody's place of whom it knows none
        url = owner.url if is_first else masters[0].url
        store = RedisFleetStore(RedisClient(RedisConfig(url, key_prefix=prefix)))
        stack.push_async_callback(store.close)
        await store.put_group("chat", b"wish")
        async with replica.client() as client:
            await until(client.dbsize)
        owner.process.kill()
        with pytest.raises(StoreUnavailableError):
            await store.list_groups()

        async def is_master() -> bool:
            return "role:master" in await replica.tell("INFO", "replication")

        await until(is_master)
        loop = asyncio.get_running_loop()
        began, found = loop.time(), dict[str, bytes]()
        while not found:
            assert loop.time() < began + RECOVERED_S
            with contextlib.suppress(StoreUnavailableError):
                found = await store.list_groups()
            await asyncio.sleep(0.01)
        assert found == {"chat": b"wish"}
