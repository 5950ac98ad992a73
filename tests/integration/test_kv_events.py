"""A subscriber as vLLM's users write it, against a worker that serves requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvmesh.cli.probes import accepts, free_ports
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import Endpoint
from kvmesh.kv.hashing import chain_hashes
from kvmesh.runtime.kv_event_publisher import END_SEQUENCE, MAX_REQUEST_BYTES, KvEventPublisher
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, EventsSection, TiersSection, WorkerSection
from tests.worker_driver import ROOT, Driver, Key, make_spec, running_worker, until_idle

BLOCK_SIZE = 16
# Small, so that blocks are evicted.
ENGINE = EngineSection(kind="fake", num_blocks=24, block_size=BLOCK_SIZE)
LOCAL = "tcp://127.0.0.1:*"

Hash = int | bytes


# The fields and options of vLLM's own structs; what it sends is what these read.
class ArrayEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """An event as vLLM before 0.28 encodes it."""


class MapEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """An event as vLLM encodes it since 0.28."""


class ArrayStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class ArrayRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None


class ArrayCleared(ArrayEvent, tag="AllBlocksCleared"):
    pass


class MapStored(MapEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class MapRemoved(MapEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class MapCleared(MapEvent, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[MapStored | MapRemoved | MapCleared]
    data_parallel_rank: int | None = None


class Indexer:
    """Follows one worker: live batches, and older ones over the replay socket."""

    def __init__(self, publisher: KvEventPublisher, encoding: str) -> None:
        self.decoder: Any = msgspec.msgpack.Decoder(
            {"array": ArrayBatch, "map": MapBatch}[encoding]
        )
        self.context = zmq.asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        self.sub.connect(publisher.endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(publisher.replay_endpoint)
        self.held: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
        self.lower: dict[Hash, str | None] = {}
        # With events as arrays, as vLLM before 0.26: no topic.
        self.topics = [b"kv-events", b""] if encoding == "map" else []
        self.next = 0
        self.media: set[str | None] = set()
        self.adapters: dict[Hash, str | None] = {}

    def close(self) -> None:
        self.context.destroy(linger=0)

    async def catch_up(self) -> None:
        """Asks for everything from the first batch that is missing."""
        await self.replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            empty, *topic, number, payload = await self.replay.recv_multipart()
            assert empty == b""
            if number == END_SEQUENCE:
                assert payload == b""
                assert topic == self.topics[-1:]
                return
            assert topic == self.topics[:1]
            self.apply(int.from_bytes(number, "big"), payload)

    async def live(self) -> None:
        """Reads what has come; a gap is filled by the replay."""
        while await self.sub.poll(0):
            topic, number, payload = await self.sub.recv_multipart()
            assert topic == b"kv-events"
            if int.from_bytes(number, "big") > self.next:
                await self.catch_up()
            self.apply(int.from_bytes(number, "big"), payload)

    def apply(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return
        assert number == self.next, "no batch is left out"
        self.next += 1
        for event in self.decoder.decode(payload).events:
            match type(event).__name__.removeprefix("Array").removeprefix("Map"):
                case "Stored":
                    self._store(event)
                case "Removed":
                    for name in event.block_hashes:
                        if self.lower.get(name) == event.medium:
                            del self.lower[name]
                        else:
                            del self.held[name]
                case "Cleared":
                    self.held.clear()

    def _store(self, event: Any) -> None:
        assert event.block_size == BLOCK_SIZE
        self.media.add(event.medium)
        if not event.token_ids:
            self.lower |= dict.fromkeys(event.block_hashes, event.medium)
            return
        assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes)
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            tokens = event.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            assert name not in self.held
            self.held[name] = (parent, tuple(tokens))
            self.adapters[name] = event.lora_name
            parent = name


@asynccontextmanager
async def publishing(
    tiers: TiersSection | None = None, **changes: Any
) -> AsyncIterator[tuple[Worker, KvEventPublisher]]:
    section = EventsSection(endpoint=LOCAL, replay_endpoint=LOCAL, **changes)
    async with running_worker(WorkerSection(id="h"), ENGINE, section, tiers=tiers) as worker:
        publisher = worker._kv_events
        assert isinstance(publisher, KvEventPublisher)
        yield worker, publisher


async def serve(worker: Worker, prompts: list[list[int]], adapter: str = "") -> None:
    driver = Driver()
    await driver.connect(worker)
    for number, prompt in enumerate(prompts):
        spec = replace(make_spec(prompt, max_tokens=20), adapter=adapter)
        await driver.generate(worker, worker, Key(f"{prompt[0]}-{number}"), spec)
    await until_idle(worker)
    await driver.close()


def prompts(first: int, count: int) -> list[list[int]]:
    """Prompts that share their first block in pairs."""
    return [[first + number // 2] * BLOCK_SIZE + [number] * 40 for number in range(count)]


@pytest.mark.parametrize("encoding", ["array", "map"])
@pytest.mark.parametrize("int_hashes", [True, False])
async def test_an_indexer_knows_what_the_worker_holds(encoding: str, int_hashes: bool) -> None:
    async with publishing(encoding=encoding, int_hashes=int_hashes) as (worker, publisher):
        await serve(worker, prompts(1, 12))
        publisher.flush()
        indexer = Indexer(publisher, encoding)
        try:
            await indexer.catch_up()
            name = publisher._wire.name
            assert set(indexer.held) == {name(each) for each in worker.core.pool.held_hashes()}
            assert indexer.media == {"CPU"}
            assert worker.core.pool.statistics().evicted_total > 0

            # Parents and tokens lead to the same hashes as the gateway's.
            deepest = max(indexer.held, key=lambda each: len(self_and_parents(indexer, each)))
            path = self_and_parents(indexer, deepest)
            tokens = [token for each in path for token in indexer.held[each][1]]
            assert [name(each) for each in chain_hashes(ROOT, tokens, BLOCK_SIZE)] == path
        finally:
            indexer.close()


async def test_an_indexer_knows_what_lies_on_disk_also_after_a_restart(tmp_path: Path) -> None:
    tiers = TiersSection(disk_gib=0.001, disk_path=str(tmp_path))
    for life in range(2):
        async with publishing(tiers, encoding="array") as (worker, publisher):
            if not life:
                await serve(worker, prompts(1, 12))
            publisher.flush()
            indexer = Indexer(publisher, "array")
            try:
                await indexer.catch_up()
                pool, name = worker.core.pool, publisher._wire.name
                here = {each for each in pool.held_hashes() if pool.find(each) is not None}
                assert set(indexer.held) == {name(each) for each in here}
                below = {name(each) for each in pool.held_hashes() if each not in here}
                assert indexer.lower == dict.fromkeys(below, "DISK")
                assert below
            finally:
                indexer.close()


@pytest.mark.parametrize("encoding", ["array", "map"])
async def test_blocks_name_the_adapter_that_they_were_computed_with(encoding: str) -> None:
    async with publishing(encoding=encoding) as (worker, publisher):
        worker.core.spec = replace(worker.core.spec, adapters=("sql@1",))
        await serve(worker, [[1] * 40])
        await serve(worker, [[2] * 40], "sql@1")
        publisher.flush()
        indexer = Indexer(publisher, encoding)
        try:
            await indexer.catch_up()
        finally:
            indexer.close()
        told = {(indexer.held[name][1][0], indexer.adapters[name]) for name in indexer.held}
        assert told >= {(1, None), (2, "sql")}
        assert {adapter for first, adapter in told if first in (1, 2)} == {None, "sql"}
        assert not told & {(1, "sql"), (2, None)}


def self_and_parents(indexer: Indexer, name: Hash) -> list[Hash]:
    """From the start of the sequence; only of blocks whose ancestors are all held."""
    path = [name]
    while (parent := indexer.held[path[0]][0]) is not None:
        if parent not in indexer.held:
            return []
        path.insert(0, parent)
    return path


async def test_live_batches_follow_each_other_and_a_gap_is_filled() -> None:
    async with publishing(encoding="array") as (worker, publisher):
        await serve(worker, prompts(1, 2))
        indexer = Indexer(publisher, "array")
        try:
            # What was published before it subscribed is a gap; live batches come from then on.
            async with asyncio.timeout(20):
                start = 50
                while indexer.next == 0:
                    await serve(worker, prompts(start, 1))
                    publisher.flush()
                    await indexer.live()
                    start += 1
            await serve(worker, prompts(200, 8))
            publisher.flush()
            await indexer.catch_up()
            await indexer.live()
            assert indexer.next == publisher.num_batches
            name = publisher._wire.name
            assert set(indexer.held) == {name(each) for each in worker.core.pool.held_hashes()}
        finally:
            indexer.close()


async def test_only_the_last_batches_are_kept_and_nonsense_is_ignored() -> None:
    async with publishing(buffer_batches=2) as (worker, publisher):
        for first in (1, 2, 3):
            await serve(worker, [[first] * 40])
            publisher.flush()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.connect(publisher.replay_endpoint)
            await asking.send_multipart((b"", b"short"))
            await asking.send_multipart((b"nonsense",))
            await asking.send_multipart((b"", (0).to_bytes(8, "big")))
            numbers = []
            while (frames := await asking.recv_multipart())[2] != END_SEQUENCE:
                numbers.append(int.from_bytes(frames[2], "big"))
        assert numbers == [publisher.num_batches - 2, publisher.num_batches - 1]


@pytest.mark.parametrize("kind", [zmq.SUB, zmq.DEALER])
async def test_a_message_that_is_too_long_is_not_received(kind: int) -> None:
    async with publishing() as (_, publisher):
        endpoint = publisher.endpoint if kind == zmq.SUB else publisher.replay_endpoint
        with (
            zmq.asyncio.Context() as context,
            context.socket(kind) as asking,
            asking.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor,
        ):
            asking.connect(endpoint)
            long = bytes(MAX_REQUEST_BYTES + 1)
            if kind == zmq.SUB:
                asking.setsockopt(zmq.SUBSCRIBE, long)
            else:
                await asking.send_multipart((b"", long))
            async with asyncio.timeout(30):
                await monitor.recv_multipart()  # it was cut


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (EventsSection(endpoint="tcp://not an address:*"), r"events\.endpoint"),
        (EventsSection(endpoint=LOCAL, replay_endpoint="carrier://*"), "replay_endpoint"),
        (EventsSection(endpoint=LOCAL, encoding="xml"), "encoding must be one of array, map"),
    ],
)
async def test_a_wrong_option_is_named(section: EventsSection, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with running_worker(WorkerSection(id="h"), ENGINE, section):
            pass


async def test_one_address_can_be_listened_on() -> None:
    live, replay = free_ports("127.0.0.1", 2)
    section = EventsSection(
        endpoint=f"@tcp://127.0.0.1:{live}", replay_endpoint=f"tcp://127.0.0.1:{replay}"
    )
    async with running_worker(WorkerSection(id="h"), ENGINE, section):
        for port in (live, replay):
            assert await accepts(Endpoint("127.0.0.1", port))


async def test_nothing_is_opened_unless_asked_for() -> None:
    async with running_worker(WorkerSection(id="h"), ENGINE) as worker:
        assert worker._kv_events is None
        assert worker.core.on_sealed is None
