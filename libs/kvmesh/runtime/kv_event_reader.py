"""Follows the KV events of a `vllm serve` or of a worker, which both publish in vLLM's format.

Tests: tests/integration/test_kv_event_reader.py, tests/vllm/test_kv_events.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvmesh.core.errors import ConfigError, LostError, ProtocolError
from kvmesh.runtime.kv_event_publisher import END_SEQUENCE, HIGH_WATER_MARK

Name = int | bytes
"""A block's hash, in either of vLLM's forms."""

MAX_BATCH_BYTES = 256 << 20
"""Longest message; a batch has the tokens of its blocks."""

REPLAY_S = 5.0
"""Longest wait for a batch that is given again."""

_KEPT = 256
"""Number of latest batches that are kept, to recognise one that arrives twice. Other batches with
earlier numbers are those of a publisher that has restarted."""

_FRAMES, _REPLAYED = 3, 4
"""Frames of a live batch, and of one that is given again with its topic."""

_NUMBER_BYTES = 8
_STORED, _REMOVED, _CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_FIELDS = {
    _STORED: (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ),
    _REMOVED: ("block_hashes", "medium"),
    _CLEARED: (),
}
"""Fields of each event in the order in which arrays have them; releases add more at the end."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that can be matched from now on.

    Attributes:
        parent: the block before the first one; None at the start of a sequence.
        token_ids: of all blocks; empty where the publisher knows none.
        medium, adapter: empty if the event names none.
    """

    names: tuple[Name, ...]
    parent: Name | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str
    adapter: str


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that are no longer in a medium."""

    names: tuple[Name, ...]
    medium: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is cached."""


ReadEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Events that were published together.

    Attributes:
        number: of the batch; the publisher's first one is 0.
        unix_s: when it was published.
        num_missed: batches before it that did not come and could not be had again.
        num_unknown: events of kinds that are not known here.
        is_restart: the publisher has begun anew, and holds nothing of before.
    """

    number: int
    unix_s: float
    events: tuple[ReadEvent, ...]
    num_missed: int = 0
    num_unknown: int = 0
    is_restart: bool = False


def decode_batch(payload: bytes, number: int = 0, num_missed: int = 0) -> ReadBatch:
    """Decodes a batch; its events are arrays or maps.

    Raises:
        ProtocolError: it is no batch of KV events.
    """
    try:
        unix_s, raw, *_ = msgspec.msgpack.decode(payload, type=list[Any])
        read = [_event(each) for each in raw]
        events = tuple(each for each in read if each is not None)
        return ReadBatch(number, float(unix_s), events, num_missed, len(read) - len(events))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError("kv events", f"batch {number} is none of KV events: {error}") from error


def _event(raw: Any) -> ReadEvent | None:
    if isinstance(raw, dict):
        kind, fields = raw["type"], raw
    else:
        kind, *values = raw
        fields = dict(zip(_FIELDS.get(kind, ()), values, strict=False))
    if kind == _STORED:
        return Stored(
            _names(fields["block_hashes"]),
            _name(fields["parent_block_hash"]),
            tuple(map(int, fields["token_ids"])),
            int(fields["block_size"]),
            fields.get("medium") or "",
            fields.get("lora_name") or "",
        )
    if kind == _REMOVED:
        return Removed(_names(fields["block_hashes"]), fields.get("medium") or "")
    return Cleared() if kind == _CLEARED else None


def _names(raw: Sequence[Any]) -> tuple[Name, ...]:
    names = tuple(map(_name, raw))
    if None in names:
        raise ValueError("a block without a hash")
    return tuple(name for name in names if name is not None)


def _name(raw: Any) -> Name | None:
    if raw is None or (isinstance(raw, int | bytes) and not isinstance(raw, bool)):
        return raw
    raise ValueError(f"{raw!r} is no hash")


class KvEventReader:
    """A subscriber of one publisher.

    Args:
        endpoint: of the publisher, such as tcp://host:5557.
        replay_endpoint: where it gives batches again; empty: it does not.
        topic: beginning of the topics to read.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._socket(zmq.SUB)
        self._replay = self._socket(zmq.DEALER) if replay_endpoint else None
        self._topic = topic.encode()
        self._next = 0
        self._given = deque[tuple[int, bytes]](maxlen=_KEPT)
        try:
            self._live.set_hwm(HIGH_WATER_MARK)
            self._live.setsockopt_string(zmq.SUBSCRIBE, topic)
            _connect(self._live, endpoint)
            if self._replay is not None:
                _connect(self._replay, replay_endpoint)
        except ConfigError:
            self.close()
            raise

    async def batches(self) -> AsyncGenerator[ReadBatch, None]:
        """Yields batches in order, from the oldest that the publisher gives again; never ends.

        Raises:
            ProtocolError: a message is no batch of KV events.
            LostError: nobody gives missed batches again.
        """
        async for batch in self._given_again():
            yield batch
        is_first = self._replay is None
        while True:
            number, payload = _parts(await self._live.recv_multipart())
            if is_first:
                self._next, is_first = number, False
            if number < self._next and not self._is_repeated(number, payload):
                # Numbers begin again when the publisher does.
                self._next = number
                yield replace(self._counted(number, payload), is_restart=True)
            elif number >= self._next:
                async for batch in self._given_again(number):
                    yield batch
                yield self._counted(number, payload)

    def close(self) -> None:
        """Closes the sockets. May be called again."""
        self._context.destroy(linger=0)

    async def _given_again(self, end: int | None = None) -> AsyncIterator[ReadBatch]:
        """The batches before number `end` that are missing; None: all that are kept."""
        if self._replay is None or end == self._next:
            return
        await self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        while True:
            try:
                async with asyncio.timeout(REPLAY_S):
                    frames = await self._replay.recv_multipart()
            except TimeoutError as error:
                text = f"nobody gives missed batches again within {REPLAY_S:g} s"
                raise LostError(text) from error
            if len(frames) == _REPLAYED and frames[1].startswith(self._topic):
                frames = frames[1:]  # vLLM before 0.26 leaves the topic out
            if len(frames) >= _FRAMES and frames[-2] == END_SEQUENCE:
                return
            number, payload = _parts(frames)
            if number >= self._next and (end is None or number < end):
                yield self._counted(number, payload)

    def _counted(self, number: int, payload: bytes) -> ReadBatch:
        missed, self._next = number - self._next, number + 1
        self._given.append((number, payload))
        return decode_batch(payload, number, missed)

    def _is_repeated(self, number: int, payload: bytes) -> bool:
        """Whether the replay socket has given a live batch before it came."""
        return (number, payload) in self._given

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        made = self._context.socket(kind)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH_BYTES)
        return made


@dataclass(slots=True)
class HeldBlocks:
    """The blocks that a publisher holds, from the events that were read of it.

    Attributes:
        num_batches: batches so far.
        num_stored, num_removed: blocks so far.
        num_missed: batches that did not come, so that the rest may be wrong.
        num_unknown: events of kinds that are not known here.
    """

    num_batches: int = 0
    num_stored: int = 0
    num_removed: int = 0
    num_missed: int = 0
    num_unknown: int = 0
    _by_medium: defaultdict[str, dict[Name, str]] = field(default_factory=lambda: defaultdict(dict))

    def apply(self, batch: ReadBatch) -> None:
        """Takes a batch in."""
        if batch.is_restart:
            self._by_medium.clear()
        self.num_batches += 1
        self.num_missed += batch.num_missed
        self.num_unknown += batch.num_unknown
        for event in batch.events:
            match event:
                case Stored():
                    self.num_stored += len(event.names)
                    self._by_medium[event.medium] |= dict.fromkeys(event.names, event.adapter)
                case Removed():
                    self.num_removed += len(event.names)
                    for name in event.names:
                        self._by_medium[event.medium].pop(name, None)
                case Cleared():
                    self._by_medium.clear()

    @property
    def media(self) -> dict[str, int]:
        """Number of blocks in each medium."""
        return {medium: len(held) for medium, held in sorted(self._by_medium.items()) if held}

    @property
    def adapters(self) -> dict[str, int]:
        """Number of blocks of each adapter, in all media; those of none have an empty name."""
        return dict(Counter(each for held in self._by_medium.values() for each in held.values()))

    def names(self, medium: str) -> frozenset[Name]:
        """The blocks in a medium."""
        return frozenset(self._by_medium.get(medium, ()))


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{endpoint}: {error.strerror}; an endpoint is like tcp://host:5557"
        ) from error


def _parts(frames: list[bytes]) -> tuple[int, bytes]:
    """The number and the content of a message, of either socket."""
    if len(frames) != _FRAMES or len(frames[1]) != _NUMBER_BYTES:
        raise ProtocolError("kv events", f"a message of {len(frames)} frames is none of vLLM's")
    return int.from_bytes(frames[1], "big"), frames[2]
