"""Streams are written in any order of failures, and read as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvmesh.core.errors import GoneError
from kvmesh.core.types import RequestId, SamplingParams
from kvmesh.core.values import changed
from kvmesh.metadata.journal_store import Line
from kvmesh.metadata.store import StoreUnavailableError
from services.gateway.api.openai import ApiCall, Endpoint, TextPrompt
from services.gateway.metrics import GatewayMetrics
from services.gateway.request import journal as journal_module
from services.gateway.request.choice import Behind, Caller, Choice
from services.gateway.request.event_ids import GivenId, parse_id
from services.gateway.request.journal import HEAD_BYTES, MAX_REPEATED, Entry, Journal
from services.gateway.request.kept_stream import (
    Kept,
    delivered_of,
    kept_by_client,
    kept_of,
    record_bytes,
)
from services.gateway.request.mesh import GenerationRequest
from services.gateway.request.stream_head import Head, head_bytes

HEAD = Head(
    "text_completion", "me", "name", 7, 2**64 - 1, 5, ("fp", "fp"), "", "auto", b'{"a":\n1}'
)
CALLER = Caller(0.0)


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flush writes all tokens, however few they are."""
    monkeypatch.setattr(journal_module, "MAX_REPEATED", 1)


def test_a_stream_is_read_as_it_was_written() -> None:
    records = [record_bytes(1, 0, [5, 6]), record_bytes(0, 0, [2**32 - 1]), record_bytes(1, 2, [7])]
    expected = Kept(HEAD, [[2**32 - 1], [5, 6, 7]], [0, 0])
    assert kept_of([head_bytes(HEAD), *records]) == expected
    assert kept_of([head_bytes(HEAD), b"", b"".join(records)]) == expected


def test_what_was_written_twice_counts_once() -> None:
    """A write whose answer was lost is made again, with what came since."""
    records = [record_bytes(0, 0, [1, 2]), record_bytes(0, 0, [1, 2, 3]), record_bytes(0, 3, [4])]
    assert kept_of([head_bytes(HEAD), *records]).token_ids[0] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "part", [b"\0", b"\0" * 9, b"\5" + b"\0" * 5 + b"\1\0\0\0aaaa", b"\0" * 6 + b"\1\0\0\0aaa"]
)
def test_what_is_no_record_is_noticed(part: bytes) -> None:
    with pytest.raises((ValueError, LookupError)):
        kept_of([head_bytes(HEAD), part])


@dataclass
class FakeStore:
    """Lists of bytes, and an answer that may be lost."""

    streams: dict[str, list[bytes]] = field(default_factory=dict)
    lives: dict[str, float | None] = field(default_factory=dict)
    loses_answers: int = 0
    hangs: bool = False

    async def write(self, lines: Sequence[Line]) -> list[bool]:
        if self.hangs:
            await asyncio.Future()
        found = []
        for line in lines:
            if line.word == "begin":
                self.streams[line.key] = [line.head, line.records]
            elif line.word == "add" and line.key in self.streams:
                self.streams[line.key].append(line.records)
                if line.head:
                    self.streams[line.key][0] = line.head
            elif line.word == "drop":
                self.streams.pop(line.key, None)
            self.lives[line.key] = line.life_s or self.lives.get(line.key)
            found.append(line.key in self.streams)
        if self.loses_answers:
            self.loses_answers -= 1
            raise StoreUnavailableError("lost")
        return found

    async def read(self, key: str, mark: bytes) -> list[bytes]:
        found = list(self.streams.get(key, []))
        if found:
            self.streams[key].append(mark)
        return found


def _journal(store: FakeStore, max_bytes: int = 10_000, timeout_s: float = 5.0) -> Journal:
    metrics = GatewayMetrics()
    return Journal(
        store, metrics, max_bytes=max_bytes, keep_s=60.0, longest_s=600.0, timeout_s=timeout_s
    )


def _choices(count: int) -> list[Choice]:
    call = ApiCall(Endpoint.COMPLETION, "m", (TextPrompt("x"),), SamplingParams())
    request = GenerationRequest(RequestId("r"), "m", (1,), b"", SamplingParams(), 0.0, 1.0)
    return [Choice(number, 0, request, call) for number in range(count)]


def _open(journal: Journal, choices: Sequence[Choice] = (), given: str = "") -> Entry:
    entry = journal.open(HEAD, choices or _choices(2), parse_id(given) if given else None)
    assert entry is not None
    return entry


async def _opened(journal: Journal) -> Entry:
    """A stream that the journal has."""
    entry = _open(journal)
    journal.mark(entry)
    await journal.flush()
    assert entry.name == entry.key
    return entry


def _given(entry: Entry) -> GivenId:
    return parse_id(entry.id_line()[4:-1])


def _tokens(entry: Entry, kept: Kept) -> list[tuple[int, ...] | None]:
    """What the client has, as another gateway finds out."""
    return [each and each.token_ids for each in delivered_of(_given(entry), kept).choices]


async def test_ids_name_what_is_not_written_yet() -> None:
    journal = _journal(store := FakeStore())
    entry = await _opened(journal)
    entry.after(0, [10, 11])
    entry.after(1, [12])
    assert entry.id_line() == f"id: {entry.key}:0.a.b,0.c\n"
    await journal.flush()
    assert entry.id_line() == f"id: {entry.key}:2,1\n"
    entry.after(0, [13])
    assert _tokens(entry, kept_of(store.streams[entry.key])) == [(10, 11, 13), (12,)]


async def test_few_tokens_wait_in_ids_until_these_have_repeated_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "MAX_REPEATED", MAX_REPEATED)
    journal = _journal(store := FakeStore())
    entry = _open(journal)
    num_repeated = count = 0
    while num_repeated + count + 1 < MAX_REPEATED:
        count += 1
        num_repeated += count
        entry.after(count % 2, [count])
        await journal.flush()
        assert not store.streams, "short answers are never written"
        assert sum(len(place.tail) for place in _given(entry).places) == count
    assert count == 63, "as the constant says"
    entry.after(0, [7])
    await journal.flush()
    assert kept_of(store.streams[entry.key]).token_ids == [
        [*range(2, 64, 2), 7],
        [*range(1, 64, 2)],
    ]
    assert [place.tail for place in _given(entry).places] == [(), ()]
    entry.after(0, [8])
    await journal.flush()
    assert _given(entry).places[0].tail == (8,)
    entry.close()
    await journal.flush()
    assert kept_of(store.streams[entry.key]).token_ids[0][-1] == 8


async def test_events_of_many_tokens_have_longer_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "MAX_REPEATED", MAX_REPEATED)
    journal = _journal(store := FakeStore())
    entry = _open(journal, _choices(1))
    for number in range(1, 13):
        entry.after(0, range(24))
        await journal.flush()
        assert len(_given(entry).places[0].tail) == 24 * number
    assert not store.streams
    entry.after(0, range(24))
    await journal.flush()
    assert _given(entry).places[0].num_kept == 24 * 13


async def test_until_its_head_is_written_an_id_tells_the_start() -> None:
    journal = _journal(store := FakeStore())
    entry = _open(journal)
    entry.after(0, [10])
    given = _given(entry)
    assert given.is_whole
    assert store.streams == {}
    kept = kept_by_client(given, HEAD.owner, CALLER, HEAD.body)
    assert kept.head == HEAD
    delivered = delivered_of(given, kept)
    assert delivered.choices == (Behind((10,), 0, is_complete=False), None)
    assert not delivered.is_paid, "whoever says so may be wrong"
    await journal.flush()
    entry.after(0, [11])
    assert _given(entry).start == ""
    assert kept_of(store.streams[entry.key]).token_ids == [[10], []]
    assert delivered_of(_given(entry), kept_of(store.streams[entry.key])).is_paid


async def test_whoever_resumes_from_one_place_again_pays_for_the_prompt() -> None:
    journal = _journal(store := FakeStore())
    entry = await _opened(journal)
    entry.after(0, [10])
    await journal.flush()
    first, again = [await journal.read(entry.key) for _ in range(2)]
    assert first is not None
    assert again is not None
    given = _given(entry)
    assert delivered_of(given, first).is_paid
    assert delivered_of(given, again) == delivered_of(given, first)._replace(is_paid=False)
    entry.after(0, [11])
    await journal.flush()
    assert kept_of(store.streams[entry.key]).token_ids == [[10, 11], []]
    assert await journal.read("another") is None


async def test_a_stream_that_goes_on_is_the_old_one_until_it_is_written() -> None:
    """Its gateway may die before that."""
    journal = _journal(store := FakeStore())
    old = await _opened(journal)
    old.after(0, [1, 2])
    await journal.flush()
    old.after(0, [3])
    (choice, other), last_id = _choices(2), old.id_line()[4:-1]
    behind = Behind((1, 2, 3), 0, is_complete=False)
    entry = _open(journal, [changed(choice, behind=behind), other], last_id)
    entry.after(0, [4])
    assert entry.key != old.key
    assert _given(entry).key == old.key
    before = list(store.streams[old.key])
    assert _tokens(entry, kept_of(before)) == [(1, 2, 3, 4), None]
    await journal.flush()
    entry.after(0, [5])
    assert _given(entry).key == entry.key
    assert _tokens(entry, kept_of(store.streams[entry.key])) == [(1, 2, 3, 4, 5), None]
    assert kept_of(store.streams[old.key]).token_ids[0] == [1, 2, 3], "two never write to one"


async def test_another_checkpoint_before_the_first_token() -> None:
    journal = _journal(store := FakeStore())
    entry = _open(journal)
    entry.placed(0, "other")
    entry.after(0, [1])
    kept = kept_by_client(_given(entry), HEAD.owner, CALLER, HEAD.body)
    assert kept.head.checkpoints == ("other", "fp")
    await journal.flush()
    assert kept_of(store.streams[entry.key]).head.checkpoints == ("other", "fp")
    entry.placed(1, "other")  # the other choice moves later, and before its first token
    assert _given(entry).start
    entry.after(1, [2])
    await journal.flush()
    assert _given(entry).start == ""
    assert kept_of(store.streams[entry.key]) == Kept(
        changed(HEAD, checkpoints=("other", "other")), [[1], [2]], [0, 0]
    )


async def test_a_lost_answer_loses_and_repeats_nothing() -> None:
    journal = _journal(store := FakeStore())
    entry = await _opened(journal)
    entry.after(0, [1, 2])
    store.loses_answers = 1
    await journal.flush()
    assert _given(entry).places[0].tail == (1, 2)
    entry.after(0, [3])
    await journal.flush()
    assert _given(entry).places[0].tail == ()
    assert kept_of(store.streams[entry.key]).token_ids[0] == [1, 2, 3]


async def test_a_store_that_has_forgotten_a_stream() -> None:
    journal = _journal(store := FakeStore())
    entry = await _opened(journal)
    store.streams.clear()
    entry.after(0, [1])
    await journal.flush()
    assert entry.id_line() == "id:\n", "clients are not to come back with it"
    assert store.streams == {}


async def test_a_store_that_hangs_holds_nobody_up() -> None:
    """Streams go on without it, and are written when it is back."""
    journal = _journal(store := FakeStore(), timeout_s=0.01)
    store.hangs = True
    entry = _open(journal)
    entry.after(0, [1])
    await journal.flush()
    entry.after(0, [2])
    assert _given(entry).is_whole
    assert _given(entry).places[0].tail == (1, 2)
    ended = _open(journal)
    ended.after(0, [3])
    ended.close()
    store.hangs = False
    await journal.flush()
    assert kept_of(store.streams[entry.key]).token_ids[0] == [1, 2]
    assert kept_of(store.streams[ended.key]).token_ids[0] == [3]
    assert store.lives == {entry.key: 660.0, ended.key: 60.0}


async def test_ended_streams_make_room_and_open_ones_do_not() -> None:
    size = len(HEAD.body) + HEAD_BYTES
    journal = _journal(store := FakeStore(), max_bytes=2 * size)
    first, second = await _opened(journal), await _opened(journal)
    third = _open(journal)
    third.after(0, [1])
    await journal.flush()
    assert set(store.streams) == {first.key, second.key}
    assert _given(third).is_whole, "as long as there is no room"
    second.close()
    second.close()
    await journal.flush()
    assert store.lives[second.key] == 60.0
    await journal.flush()
    assert set(store.streams) == {first.key, third.key}
    assert _given(third).start == ""
    assert kept_of(store.streams[third.key]).token_ids[0] == [1]


async def test_a_stream_that_ends_without_room_is_forgotten() -> None:
    journal = _journal(store := FakeStore(), max_bytes=10)
    entry = _open(journal)
    entry.after(0, [1])
    entry.close()
    await journal.flush()
    assert not entry.is_kept
    assert not entry.is_dirty
    assert store.streams == {}


async def test_a_stream_of_which_less_is_kept_is_gone() -> None:
    kept = Kept(HEAD, [[1, 2], []], [0, 0])
    key = "k" * 22
    with pytest.raises(GoneError, match="not kept"):
        delivered_of(parse_id(f"{key}:3,"), kept)
    with pytest.raises(GoneError, match="another stream"):
        delivered_of(parse_id(f"{key}:1"), kept)
    found = delivered_of(parse_id(f"{key}:1,"), kept)
    assert found.choices[0] is not None
    assert found.choices[0].token_ids == (1,), "what it has not seen is made again"
    assert found.choices[1] is None
