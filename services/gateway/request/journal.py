"""What another gateway needs to go on with a stream: its request, and its tokens so far.

Nothing waits for it but a stream's first event, which leaves when the head is written: from then on
an id names the tokens that are not written yet itself (`event_ids`). Tokens of all streams are
written together, every `FLUSH_S`. A stream that goes on is written under a new key: two gateways
never write to one.
Tests: tests/integration/test_gateway_resume.py, tests/unit/gateway/request/test_journal.py.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from kvmesh.core.errors import GoneError
from kvmesh.metadata.journal_store import Line
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.policy.quota import Tenant
from kvmesh.telemetry.logs import event_logger
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.choice import Behind, Choice, Delivered
from services.gateway.request.event_ids import MAX_CHOICES, MAX_TAIL, GivenId, Place, id_line
from services.gateway.tenants.admission import Ticket

log = event_logger(__name__)

FLUSH_S = 0.1
"""Tokens are written at most this late, while Redis answers."""
PROBE_S = 1.0
"""After a failure Redis is left alone for this long."""

_RECORD = struct.Struct("<HI")
_CACHED = 0x8000
"""Set in a record's choice: its number is that of cached prompt tokens, and no tokens follow."""


class JournalStore(Protocol):
    """Where streams are written; see `RedisJournalStore`. Raises StoreUnavailableError."""

    async def write(self, lines: Sequence[Line]) -> list[bool]:
        """Writes in order; for `begin` and `add`, whether the stream is there."""
        ...

    async def read(self, key: str) -> list[bytes]:
        """Head and records of a stream; empty if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """A stream's request, and what was settled when it came.

    Attributes:
        kind: which API it came in by.
        owner: tenant that may go on with it.
        created: seconds since the epoch, as in its events.
        seed: of the call.
        prompt_sum: of the prompts' token ids; another sum, another model or day.
        num_choices: generations.
        checkpoint: fingerprint of the one that serves it.
        body: as the client sent it.
    """

    kind: str
    owner: str
    request_id: str
    created: int
    seed: int
    prompt_sum: int
    num_choices: int
    checkpoint: str
    scenario: str
    placement: str
    body: bytes


@dataclass(slots=True)
class Kept:
    """A stream as the journal has it.

    Attributes:
        token_ids: of each choice.
        cached_tokens: of each choice's prompt, as its usage tells.
    """

    head: Head
    token_ids: list[list[int]]
    cached_tokens: list[int]


_FIELDS = tuple(field.name for field in fields(Head) if field.name != "body")


def owner_of(ticket: Ticket | None) -> str:
    """Whose a stream is."""
    tenant = Tenant() if ticket is None else ticket.tenant
    return f"{tenant.namespace}{tenant.name}"


def head_bytes(head: Head) -> bytes:
    """A head as it is written; the body stays as it is."""
    found = {name: getattr(head, name) for name in _FIELDS}
    return json.dumps(found).encode() + b"\n" + head.body


def record_bytes(choice: int, first: int, token_ids: Sequence[int]) -> bytes:
    """Tokens of a choice, the first of them at a position."""
    return _RECORD.pack(choice, first) + array("I", token_ids).tobytes()


def kept_of(parts: Sequence[bytes]) -> Kept:
    """A stream from what was written; what was written twice counts once.

    Raises:
        ValueError, LookupError, TypeError: that is no stream.
    """
    found, _, body = parts[0].partition(b"\n")
    head = Head(**json.loads(found), body=body)
    kept = Kept(head, [[] for _ in range(head.num_choices)], [0] * head.num_choices)
    for part in parts[1:]:
        if len(part) < _RECORD.size:
            raise ValueError("a record is too short")
        choice, first = _RECORD.unpack_from(part)
        if choice & _CACHED:
            kept.cached_tokens[choice ^ _CACHED] = first
            continue
        token_ids = array("I", part[_RECORD.size :])
        kept.token_ids[choice][first : first + len(token_ids)] = token_ids
    return kept


def delivered_of(given: GivenId, kept: Kept) -> Delivered:
    """What a client has, by what it says and what the journal holds.

    Raises:
        GoneError: the journal holds less than the client says.
    """
    if len(given.places) != kept.head.num_choices:
        raise GoneError("Last-Event-ID: another stream has this key")
    choices: list[Behind | None] = []
    for choice, place in enumerate(given.places):
        token_ids = kept.token_ids[choice]
        if len(token_ids) < place.num_kept:
            raise GoneError("Last-Event-ID: the stream's tokens are not kept")
        so_far = (*token_ids[: place.num_kept], *place.tail)
        cached = kept.cached_tokens[choice] if place.cached is None else place.cached
        behind = Behind(so_far, cached, place.is_complete)
        choices.append(behind if place.is_opened else None)
    return Delivered(
        kept.head.seed, kept.head.prompt_sum, True, kept.head.checkpoint, tuple(choices)
    )


@dataclass(slots=True, eq=False)
class Entry:
    """One stream that is written.

    Attributes:
        places: where its choices are.
        begun: whether its head is written; done when that is known.
        is_kept: another gateway can go on with it.
        num_bytes: that it takes in the journal.
        is_dirty: there is something to be written.
        until: then it is forgotten; 0 as long as it grows.
    """

    journal: Journal
    key: str
    places: list[Place]
    begun: asyncio.Future[bool]
    num_bytes: int
    is_kept: bool = True
    is_dirty: bool = False
    until: float = 0.0

    def id_line(self, *, is_over: bool = False) -> str:
        """The line of an event that says where the stream is after it."""
        return id_line(self.key, self.places, is_over=is_over) if self.is_kept else "id:\n"

    def after(self, choice: int, token_ids: Sequence[int]) -> str:
        """The next event has these tokens, too: its line. Every token of a stream passes here."""
        place = self.places[choice]
        place.add(token_ids)
        if not self.is_dirty:
            self.journal.mark(self)
        if self.is_kept and len(place.waiting) < MAX_TAIL and len(self.places) == 1:
            return f"id: {self.key}:{place.text}\n"  # as nearly all are
        return self.id_line()

    def close(self) -> None:
        """The stream is over, or nobody reads it here any more. May be called again."""
        self.journal.close(self)


class _Sent(NamedTuple):
    """What was to be written of one stream.

    Attributes:
        counts: tokens of its choices.
        numbers: of its lines that tell whether it is there.
    """

    entry: Entry
    counts: list[tuple[Place, int]]
    numbers: range


def _take(entry: Entry, lines: list[Line], keep_s: float) -> _Sent:
    """Adds what a stream has to be written to the lines."""
    begin, counts = len(lines), list[tuple[Place, int]]()
    for choice, place in enumerate(entry.places):
        if place.cached is not None:
            value = _RECORD.pack(_CACHED | choice, place.cached)
            lines.append(Line("add", entry.key, value))
        if count := len(place.waiting):
            value = record_bytes(choice, place.num_tokens - count, place.waiting)
            lines.append(Line("add", entry.key, value))
        if count or place.cached is not None:
            counts.append((place, count))
    numbers = range(begin, len(lines))
    if entry.until:
        lines.append(Line("end", entry.key, life_s=keep_s))
    return _Sent(entry, counts, numbers)


class Journal:
    """Writes the streams of one gateway process, and reads those of others.

    Args:
        max_bytes: of all that it keeps; ended streams make room for new ones.
        keep_s: streams are kept for so long after their end.
        longest_s: no stream lasts longer.
        timeout_s: longest time that the store may take.
    """

    def __init__(
        self,
        store: JournalStore,
        metrics: GatewayMetrics,
        *,
        max_bytes: int,
        keep_s: float,
        longest_s: float,
        timeout_s: float,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._life_s = longest_s + keep_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._num_bytes = 0
        self._opening: list[tuple[Entry, list[Line]]] = []
        self._dirty: list[Entry] = []
        self._drops: list[Line] = []
        self._closed: deque[Entry] = deque()
        self._has_opening, self._has_more = asyncio.Event(), asyncio.Event()
        self._down_until = 0.0
        self._is_down = False

    def open(self, head: Head, choices: Sequence[Choice]) -> Entry | None:
        """Begins to write a stream, with what its client has of it; None if there is no room."""
        if head.num_choices > MAX_CHOICES or self._loop.time() < self._down_until:
            return None
        value = head_bytes(head)
        given = [() if each.behind is None else each.behind.token_ids for each in choices]
        num_bytes = len(value) + 4 * sum(map(len, given))
        if not self._make_room(num_bytes):
            return None
        key = secrets.token_urlsafe(16)
        begun = self._loop.create_future()
        entry = Entry(self, key, [Place(len(each)) for each in given], begun, num_bytes)
        lines = [Line("begin", key, value, self._life_s)]
        for choice, token_ids in enumerate(given):
            if token_ids:
                lines.append(Line("add", key, record_bytes(choice, 0, token_ids)))
        self._add_bytes(num_bytes)
        self._opening.append((entry, lines))
        self._has_opening.set()
        return entry

    def mark(self, entry: Entry) -> None:
        """It has tokens to be written."""
        entry.is_dirty = True
        self._dirty.append(entry)
        self._has_more.set()

    def close(self, entry: Entry) -> None:
        """It grows no more."""
        if entry.until:
            return
        entry.until = self._loop.time() + self._keep_s
        self._closed.append(entry)
        self._loop.call_later(self._keep_s, self._make_room, 0)
        if not entry.is_dirty:
            self.mark(entry)

    async def read(self, key: str) -> Kept | None:
        """A stream of any gateway; None if there is none.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                parts = await self._store.read(key)
        except TimeoutError as error:
            raise StoreUnavailableError("the journal does not answer") from error
        try:
            return kept_of(parts) if parts else None
        except (ValueError, LookupError, TypeError):
            return None  # of a gateway that writes it differently

    async def run(self) -> None:
        """Writes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._begin_all())
            tasks.create_task(self._add_all())

    async def flush(self) -> None:
        """Writes all that there is."""
        await self._begin_now()
        await self._add_now()

    async def _begin_all(self) -> None:
        while True:
            await self._has_opening.wait()
            await self._begin_now()

    async def _begin_now(self) -> None:
        """Writes heads; their streams wait for it."""
        self._has_opening.clear()
        opening, self._opening = self._opening, []
        if not opening:
            return
        told = await self._write([line for _, lines in opening for line in lines])
        for entry, _ in opening:
            entry.is_kept = told is not None
            if not entry.begun.done():
                entry.begun.set_result(entry.is_kept)

    async def _add_all(self) -> None:
        while True:
            await self._has_more.wait()
            await asyncio.sleep(max(FLUSH_S, self._down_until - self._loop.time()))
            await self._add_now()

    async def _add_now(self) -> None:
        """Writes tokens and ends."""
        self._has_more.clear()
        dirty, self._dirty = self._dirty, []
        lines, self._drops = self._drops, []
        sent: list[_Sent] = []
        for entry in dirty:
            entry.is_dirty = False
            if entry.begun.done():
                sent.append(_take(entry, lines, self._keep_s))
            else:
                self.mark(entry)  # its head is on the way
        told = await self._write(lines) if lines else []
        for each in sent:
            if told is None:
                self._again(each)
            else:
                self._done(each, told)

    def _done(self, sent: _Sent, told: Sequence[bool]) -> None:
        entry = sent.entry
        entry.is_kept = entry.is_kept and all(told[number] for number in sent.numbers)
        for place, count in sent.counts:
            place.kept(count)
            entry.num_bytes += 4 * count
            self._add_bytes(4 * count)

    def _again(self, sent: _Sent) -> None:
        """Nobody knows whether it was written; a second time does no harm."""
        entry = sent.entry
        if entry.is_kept and not entry.is_dirty and not entry.until:
            self.mark(entry)

    async def _write(self, lines: Sequence[Line]) -> list[bool] | None:
        """Writes; None if the store does not answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                told = await self._store.write(lines)
        except (StoreUnavailableError, TimeoutError) as error:
            self._down_until = self._loop.time() + PROBE_S
            if not self._is_down:
                log.warning("streams_without_journal", error=str(error))
            self._is_down = True
            return None
        if self._is_down:
            log.info("streams_with_journal_again")
        self._is_down = False
        return told

    def _add_bytes(self, count: int) -> None:
        self._num_bytes += count
        self._metrics.journal_bytes.inc(count)

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so much more fits, if need be without the streams that ended first."""
        now, closed = self._loop.time(), self._closed
        while closed and (closed[0].until <= now or self._num_bytes + num_bytes > self._max_bytes):
            entry = closed.popleft()
            self._add_bytes(-entry.num_bytes)
            if entry.until > now:
                self._drops.append(Line("drop", entry.key))
        return self._num_bytes + num_bytes <= self._max_bytes
