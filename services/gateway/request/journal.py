"""The journal of streams: the request and tokens that another gateway needs to resume a stream.

No event waits for Redis. An event's id holds the tokens that are not written yet (`event_ids`), and
the stream's start until that is written (`stream_head`). The journal writes a stream when its ids
have repeated `MAX_REPEATED` tokens, and when a written stream ends; it never writes short ones. All
streams are written together every `FLUSH_S`. A resumed stream is written under a new key, with ids
of the old key until then, so two gateways never write tokens to one key.
Tests: tests/integration/test_gateway_resume.py, tests/unit/gateway/request/test_journal.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvmesh.core.values import changed
from kvmesh.metadata.journal_store import Line
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.telemetry.logs import event_logger
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.choice import Choice
from services.gateway.request.event_ids import MAX_CHOICES, MAX_TAIL, GivenId, Place, id_line
from services.gateway.request.kept_stream import RESUMED, Kept, cached_bytes, kept_of, record_bytes
from services.gateway.request.stream_head import Head, head_bytes, start_text

log = event_logger(__name__)

FLUSH_S = 0.1
"""Maximum seconds until waiting tokens are written, while Redis answers."""
MAX_REPEATED = 2048
"""Number of tokens in all ids of a stream since its last write, at which it is written.

With one token per event that is a write per 64 tokens, and ids of 32 tokens on average. Events of
many tokens are fewer, and so their ids may be longer.
"""
PROBE_S = 1.0
"""Seconds without a write after a failure of Redis."""
MANY = 32
"""Number of streams with waiting tokens at which they are written before `FLUSH_S` is over."""

HEAD_BYTES = 512
"""Bytes of a head besides its body."""


class JournalStore(Protocol):
    """Storage of streams, see `RedisJournalStore`. Raises StoreUnavailableError."""

    async def write(self, lines: Sequence[Line]) -> list[bool]:
        """Writes lines in order; returns for each whether its stream is stored."""
        ...

    async def read(self, key: str, mark: bytes) -> list[bytes]:
        """Head and records of a stream, then adds `mark` to them; empty if there is none."""
        ...


@dataclass(slots=True, eq=False)
class Entry:
    """One stream that is written.

    Attributes:
        head: how it began; another one if its checkpoints change before their first tokens.
        places: where its choices are.
        before: name of the stream that it resumes; empty for a new one.
        behind: tokens of each choice that came before.
        name: as ids have it.
        written: the head that the journal has.
        is_kept: another gateway can resume it.
        is_alone: it has one choice, and is kept.
        num_bytes: that it takes in the journal; 0 before it is begun there.
        room: number of tokens that its ids may still repeat; with none left it is to be written.
        is_dirty: it is going to be written.
        until: then it is forgotten; 0 as long as it grows.
    """

    journal: Journal
    key: str
    head: Head
    places: list[Place]
    before: str
    behind: list[Sequence[int]]
    name: str = ""
    written: Head | None = None
    is_kept: bool = True
    is_alone: bool = False
    num_bytes: int = 0
    room: int = 0
    is_dirty: bool = False
    until: float = 0.0

    def __post_init__(self) -> None:
        self.is_alone = len(self.places) == 1
        if all(self.head.checkpoints):
            self.rename()

    def rename(self) -> None:
        """Has ids say no more than they have to."""
        is_behind = any(place.num_kept for place in self.places)
        if self.written is self.head:
            self.name = self.key
        elif self.written is None and self.before and is_behind:
            self.name = self.before
        else:
            self.name = f"{self.key}.{start_text(self.head)}"

    def placed(self, choice: int, checkpoint: str) -> None:
        """A choice is served by a checkpoint; before its first event.

        There is no event before each choice has one, and no name either.
        """
        checkpoints = list(self.head.checkpoints)
        if checkpoints[choice] != checkpoint:
            checkpoints[choice] = checkpoint
            self.head = changed(self.head, checkpoints=tuple(checkpoints))
            if self.written is not None:
                self.room = 0
            self.rename()

    def id_line(self, *, is_over: bool = False) -> str:
        """The line of an event that says where the stream is after it."""
        return id_line(self.name, self.places, is_over=is_over) if self.is_kept else "id:\n"

    def after(self, choice: int, token_ids: Sequence[int]) -> str:
        """Adds tokens to the next event and returns its id line. Every token passes here."""
        place = self.places[choice]
        num_waiting = place.add(token_ids)
        if not self.is_alone:
            num_waiting = sum([len(each.waiting) for each in self.places])
        self.room -= num_waiting
        if self.room <= 0 and not self.is_dirty:
            self.journal.mark(self)
        if self.is_alone and num_waiting <= MAX_TAIL:
            return f"id: {self.name}:{place.told}\n"  # as nearly all are
        return self.id_line()

    def lose(self) -> None:
        """Marks the stream as lost: no gateway can resume it."""
        self.is_kept = self.is_alone = False

    def close(self) -> None:
        """Ends the entry: the stream is over, or its client is gone. Repeatable."""
        self.journal.close(self)


class _Sent(NamedTuple):
    """A write of one stream that is under way.

    Attributes:
        head: head of the stream in the journal after the write.
        counts: number of tokens written per choice.
        is_over: whether the write includes the stream's end.
    """

    entry: Entry
    head: Head
    counts: list[tuple[Place, int]]
    is_over: bool


class _Ended(NamedTuple):
    """A stream that the journal holds to its end; replaces its entry."""

    key: str
    until: float
    num_bytes: int


class Journal:
    """Writes the streams of one gateway process, and reads those of others.

    Args:
        max_bytes: maximum bytes of all kept streams; ended streams make room for new ones.
        keep_s: seconds for which a stream is kept after its end.
        longest_s: maximum seconds that a stream lasts.
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
        self._num_bytes = self._num_told = 0
        self._dirty: list[Entry] = []
        self._drops: list[Line] = []
        self._ended: deque[_Ended] = deque()
        self._tidying: asyncio.TimerHandle | None = None
        self._has_more, self._has_many = asyncio.Event(), asyncio.Event()
        self._down_until = 0.0
        self._is_down = False

    def open(
        self, head: Head, choices: Sequence[Choice], given: GivenId | None = None
    ) -> Entry | None:
        """Returns the entry of a stream to write; None if it has too many choices.

        Args:
            given: the position that the client sent, if this stream resumes another one.
        """
        if head.num_choices > MAX_CHOICES:
            return None
        behind: list[Sequence[int]] = []
        places: list[Place] = []
        for number, choice in enumerate(choices):
            token_ids = () if choice.behind is None else choice.behind.token_ids
            tail = () if given is None else given.places[number].tail
            behind.append(token_ids)
            places.append(Place(len(token_ids), tail))
        before = "" if given is None else given.name
        # A resumed stream is written soon, since its old key is going to expire.
        room = 0 if before else MAX_REPEATED
        return Entry(self, secrets.token_urlsafe(16), head, places, before, behind, room=room)

    def mark(self, entry: Entry) -> None:
        """It has something to be written."""
        entry.is_dirty = True
        self._dirty.append(entry)
        if len(self._dirty) == 1:
            self._has_more.set()
        elif len(self._dirty) == MANY:
            self._has_many.set()

    def close(self, entry: Entry) -> None:
        """It grows no more."""
        if entry.until:
            return
        entry.until = self._loop.time() + self._keep_s
        if entry.num_bytes and not entry.is_dirty:
            self.mark(entry)

    async def read(self, key: str) -> Kept | None:
        """A stream of any gateway, to be resumed; None if there is none.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                parts = await self._store.read(key, RESUMED)
        except TimeoutError as error:
            raise StoreUnavailableError("the journal does not answer") from error
        try:
            return kept_of(parts) if parts else None
        except (ValueError, LookupError, TypeError):
            return None  # of a gateway that writes it differently

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._has_more.wait()
            if (down_s := self._down_until - self._loop.time()) > 0:
                await asyncio.sleep(down_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._has_many.wait()
            await self.flush()

    async def flush(self) -> None:
        """Writes all that there is."""
        self._has_more.clear()
        self._has_many.clear()
        dirty, self._dirty = self._dirty, []
        lines: list[Line] = []
        sent: list[_Sent] = []
        for entry in dirty:
            entry.is_dirty = False
            if not entry.is_kept or self._is_late(entry):
                self._forget(entry)
            elif self._fits(entry):
                lines.append(self._line(entry))
                counts = [
                    (place, len(place.waiting))
                    for place in entry.places
                    if place.waiting or place.cached is not None
                ]
                sent.append(_Sent(entry, entry.head, counts, bool(entry.until)))
        drops, self._drops = self._drops, []
        told = await self._write([*lines, *drops]) if lines or drops else []
        if told is None:
            for each in sent:
                self._again(each.entry)
        else:
            for each, is_there in zip(sent, told, strict=False):  # then there are the drops
                self._done(each, is_there=is_there)
        self._tell_bytes()

    def _is_late(self, entry: Entry) -> bool:
        """Whether a stream that could not be written has expired meanwhile."""
        return 0 < entry.until <= self._loop.time()

    def _forget(self, entry: Entry) -> None:
        """Gives up a stream that cannot be resumed; its room is free when it has ended."""
        entry.lose()
        if entry.until:
            self._num_bytes -= entry.num_bytes
            entry.num_bytes = 0

    def _fits(self, entry: Entry) -> bool:
        """Whether there is room for a stream; if not, it is asked again, unless it is over."""
        if entry.num_bytes:
            return True
        num_bytes = len(entry.head.body) + HEAD_BYTES + 4 * sum(map(len, entry.behind))
        if self._make_room(num_bytes):
            entry.num_bytes = num_bytes
            self._num_bytes += num_bytes
            return True
        if entry.until:
            self._forget(entry)
        else:
            self._again(entry)
        return False

    def _line(self, entry: Entry) -> Line:
        """Returns the line that writes a stream's waiting part."""
        word, head, life_s = "add", b"", None
        records: list[bytes] = []
        if entry.written is not entry.head:
            head = head_bytes(entry.head)
        if entry.written is None:
            word, life_s = "begin", self._life_s
            for choice, place in enumerate(entry.places):
                if place.num_kept:
                    behind = entry.behind[choice][: place.num_kept]
                    records.append(record_bytes(choice, 0, behind))
        for choice, place in enumerate(entry.places):
            if place.cached is not None:
                records.append(cached_bytes(choice, place.cached))
            if place.waiting:
                records.append(record_bytes(choice, place.num_kept, place.waiting))
        if entry.until:
            life_s = self._keep_s
        return Line(word, entry.key, head, b"".join(records), life_s)

    def _done(self, sent: _Sent, *, is_there: bool) -> None:
        entry = sent.entry
        if not is_there:
            entry.lose()
        for place, count in sent.counts:
            place.kept(count)
            entry.num_bytes += 4 * count
            self._num_bytes += 4 * count
        entry.room = MAX_REPEATED
        if entry.written is not sent.head:
            entry.written = sent.head
            entry.behind.clear()
            entry.rename()
        if not sent.is_over:
            return
        if not entry.is_kept:
            self._forget(entry)
            return
        self._ended.append(_Ended(entry.key, entry.until, entry.num_bytes))
        if self._tidying is None:
            self._tidying = self._loop.call_at(entry.until, self._tidy)

    def _again(self, entry: Entry) -> None:
        """Writes an entry again whose write has an unknown outcome; a second write is harmless."""
        if entry.is_kept and not entry.is_dirty:
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

    def _tidy(self) -> None:
        """Forgets streams whose time is over."""
        self._make_room(0)
        self._tell_bytes()
        first = self._ended[0] if self._ended else None
        self._tidying = self._loop.call_at(first.until, self._tidy) if first is not None else None

    def _tell_bytes(self) -> None:
        self._metrics.journal_bytes.inc(self._num_bytes - self._num_told)
        self._num_told = self._num_bytes

    def _make_room(self, num_bytes: int) -> bool:
        """Whether so much more fits, if need be without the streams that ended first."""
        now, ended = self._loop.time(), self._ended
        while ended and (ended[0].until <= now or self._num_bytes + num_bytes > self._max_bytes):
            stream = ended.popleft()
            self._num_bytes -= stream.num_bytes
            if stream.until > now:
                self._drops.append(Line("drop", stream.key))
        return self._num_bytes + num_bytes <= self._max_bytes
