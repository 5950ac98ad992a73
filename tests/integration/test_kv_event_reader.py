"""Reading KV events in vLLM's format: from a worker, and from publishers that lose messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvmesh.cli.events import main
from kvmesh.core.errors import ConfigError, LostError, ProtocolError
from kvmesh.runtime import kv_event_reader
from kvmesh.runtime.kv_event_publisher import END_SEQUENCE
from kvmesh.runtime.kv_event_reader import (
    Cleared,
    HeldBlocks,
    KvEventReader,
    ReadBatch,
    Removed,
    Stored,
    decode_batch,
)
from tests.integration.test_kv_events import prompts, publishing, serve
from tests.waiting import until


async def taken(reader: KvEventReader, count: int) -> list[ReadBatch]:
    """The next batches."""
    found = []
    async with asyncio.timeout(20), aclosing(reader.batches()) as batches:
        async for batch in batches:
            found.append(batch)
            if len(found) == count:
                break
    return found


def payload(*events: Any) -> bytes:
    """A batch as vLLM encodes it."""
    return msgspec.msgpack.encode([1.5, list(events)])


def stored(*names: int, medium: str = "GPU") -> dict[str, Any]:
    """An event of vLLM 0.28 or later."""
    return {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": None,
        "token_ids": list(range(4 * len(names))),
        "block_size": 4,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": 0,
    }


class Publisher:
    """Sends what it is told to, and gives again what it still has.

    Args:
        is_old: as vLLM before 0.26, which leaves the topic out of what it gives again.
    """

    def __init__(self, *, is_old: bool = False) -> None:
        self._topics = [] if is_old else [b"kv-events"]
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        ends = (self._pub, self._router)
        for end in ends:
            end.bind("tcp://127.0.0.1:*")
        self.endpoint, self.replay = (str(end.get_string(zmq.LAST_ENDPOINT)) for end in ends)

    async def subscribed(self) -> None:
        """Waits for the subscriber."""
        await self._pub.recv()

    async def send(self, number: int, content: bytes) -> None:
        """Publishes a batch."""
        await self._pub.send_multipart((b"kv-events", number.to_bytes(8, "big"), content))

    async def answer(self) -> None:
        """Gives again what is asked for, without end."""
        while True:
            client, _, first = await self._router.recv_multipart()
            wanted = int.from_bytes(first, "big")
            self.asked.append(wanted)
            for number, content in sorted(self.kept.items()):
                if number >= wanted:
                    frames = (client, b"", *self._topics, number.to_bytes(8, "big"), content)
                    await self._router.send_multipart(frames)
            end = (client, b"", *([b""] if self._topics else []), END_SEQUENCE, b"")
            await self._router.send_multipart(end)

    def close(self) -> None:
        """Closes the sockets."""
        self._context.destroy(linger=0)


@asynccontextmanager
async def publisher(*, is_old: bool = False) -> AsyncIterator[Publisher]:
    """A publisher that answers."""
    made = Publisher(is_old=is_old)
    answering = asyncio.create_task(made.answer())
    try:
        yield made
    finally:
        answering.cancel()
        made.close()


@pytest.mark.parametrize("encoding", ["array", "map"])
@pytest.mark.parametrize("int_hashes", [True, False])
async def test_it_knows_what_a_worker_holds(encoding: str, int_hashes: bool) -> None:
    async with publishing(encoding=encoding, int_hashes=int_hashes) as (worker, source):
        await serve(worker, prompts(1, 12))
        source.flush()
        reader, held = KvEventReader(source.endpoint, source.replay_endpoint), HeldBlocks()
        for batch in await taken(reader, source.num_batches):
            held.apply(batch)
        reader.close()
        names = {source._wire.name(each) for each in worker.core.pool.held_hashes()}
        assert held.names("CPU") == names
        assert held.media == {"CPU": len(names)}
        assert held.adapters == {"": len(names)}
        assert held.num_removed == worker.core.pool.statistics().evicted_total > 0
        assert (held.num_missed, held.num_unknown) == (0, 0)


async def test_without_replay_it_knows_what_comes_from_now_on() -> None:
    async with publisher() as source:
        reader = KvEventReader(source.endpoint, topic="kv-")
        reading = asyncio.create_task(taken(reader, 2))
        await source.subscribed()
        await source.send(7, payload(stored(1, 2)))
        await source.send(9, payload(["BlockRemoved", [1], "GPU"], ["BlockPinned", 3]))
        first, second = await reading
        reader.close()
    assert (first.number, first.num_missed, second.num_missed) == (7, 0, 1)
    assert first.events == (Stored((1, 2), None, tuple(range(8)), 4, "GPU", ""),)
    assert (second.events, second.num_unknown) == ((Removed((1,), "GPU"),), 1)


@pytest.mark.parametrize("is_old", [False, True])
async def test_a_gap_is_filled_as_far_as_the_publisher_keeps_batches(is_old: bool) -> None:
    async with publisher(is_old=is_old) as source:
        source.kept = {number: payload(stored(number)) for number in (2, 3)}
        reader, held = KvEventReader(source.endpoint, source.replay), HeldBlocks()
        reading = asyncio.create_task(taken(reader, 5))
        await source.subscribed()
        await until(lambda: source.asked == [0], "it has asked for all")
        await source.send(3, source.kept[3])  # it was given again before it came
        source.kept |= {number: payload(stored(number)) for number in (4, 5, 6)}
        await source.send(6, source.kept[6])
        batches = await reading
        reader.close()
    assert [batch.number for batch in batches] == [2, 3, 4, 5, 6]
    assert [batch.num_missed for batch in batches] == [2, 0, 0, 0, 0]
    assert source.asked == [0, 4]
    for batch in batches:
        held.apply(batch)
    assert held.names("GPU") == {2, 3, 4, 5, 6}
    assert held.num_missed == 2


async def test_a_publisher_that_begins_anew_holds_nothing_of_before() -> None:
    async with publisher() as source:
        reader, held = KvEventReader(source.endpoint), HeldBlocks()
        reading = asyncio.create_task(taken(reader, 3))
        await source.subscribed()
        for number, name in ((4, 1), (5, 2), (0, 3)):
            await source.send(number, payload(stored(name)))
        batches = await reading
        reader.close()
    assert [batch.is_restart for batch in batches] == [False, False, True]
    for batch in batches:
        held.apply(batch)
    assert held.names("GPU") == {3}


async def test_nobody_who_gives_batches_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_event_reader, "REPLAY_S", 0.1)
    async with publisher() as source:
        reader = KvEventReader(source.endpoint, "tcp://127.0.0.1:1")
        with pytest.raises(LostError, match="nobody gives missed batches again"):
            await taken(reader, 1)
        reader.close()


def test_a_block_in_two_media_is_in_both_until_one_removes_it() -> None:
    held = HeldBlocks()
    events = [stored(1), stored(1, medium="CPU"), ["BlockRemoved", [1, 9], "GPU"]]
    held.apply(decode_batch(payload(*events)))
    assert held.media == {"CPU": 1}
    held.apply(decode_batch(payload({"type": "AllBlocksCleared"})))
    assert held.media == {}
    assert decode_batch(payload(["AllBlocksCleared"])).events == (Cleared(),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xff",
        payload(["BlockStored", [1]]),
        payload({"type": "BlockRemoved", "block_hashes": [1.5], "medium": "GPU"}),
        payload({"type": "BlockRemoved", "block_hashes": [None], "medium": "GPU"}),
        payload({"block_hashes": [1]}),
        payload(7),
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode(["x", []]),
    ],
)
def test_what_is_no_batch_is_named(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="batch 3 is none of KV events"):
        decode_batch(content, 3)


async def test_messages_of_other_publishers_are_named() -> None:
    async with publisher() as source:
        reader = KvEventReader(source.endpoint)
        reading = asyncio.create_task(taken(reader, 1))
        await source.subscribed()
        await source._pub.send_multipart((b"topic", b"content"))
        with pytest.raises(ProtocolError, match="a message of 2 frames"):
            await reading
        reader.close()


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:5557", "http://127.0.0.1:5557"])
def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="an endpoint is like tcp://host:5557"):
        KvEventReader(endpoint)


async def test_the_command_tells_blocks_and_events(capsys: pytest.CaptureFixture[str]) -> None:
    async with publisher() as source:
        lora = {**stored(b"\x01\x02"), "lora_name": "sql"}  # type: ignore[arg-type]
        source.kept = {
            0: payload(["AllBlocksCleared"], stored(1, 2, 3)),
            1: payload(["BlockRemoved", [2], "GPU"], lora),
        }
        where = [source.endpoint, "--replay", source.replay, "--seconds", "0.5"]
        assert await asyncio.to_thread(main, where) == 0
        told = capsys.readouterr().out
        assert "3 blocks (GPU 3), 4 stored, 1 removed, adapter sql 1" in told
        assert "missed" not in told
        assert await asyncio.to_thread(main, [*where, "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["batch"], line["event"]) for line in lines] == [
        (0, "cleared"),
        (0, "stored"),
        (1, "removed"),
        (1, "stored"),
    ]
    assert lines[1]["names"] == [1, 2, 3]
    assert lines[3]["names"] == ["0102"]


async def test_the_command_tells_that_nothing_came(capsys: pytest.CaptureFixture[str]) -> None:
    async with publisher() as source:
        assert await asyncio.to_thread(main, [source.endpoint, "--seconds", "0.2"]) == 0
    assert "no batch has come" in capsys.readouterr().out
