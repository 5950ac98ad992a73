"""Where a stream is, as its events say it in their `id`, and `Last-Event-ID` brings it back.

    <key>[.<start>]:<place>[,<place>...][$]

The key names the stream in the journal; nobody can guess it. Where the journal may not hold the
stream yet, its start is there too (`stream_head`). Each choice has a place: empty before
its first event, else the number of its tokens that the client has, and then what the journal may
not hold yet: after `~` how many of the prompt's tokens were cached, and in hex, each after a dot,
the last tokens. `!` ends the place of a choice that is complete. `$` says that the usage after all
choices is there as well.

So `Fh2bW…:7.1f.a0!` is a stream of one choice, complete after 7 tokens; the journal holds 5.
Pure. Tests: tests/unit/gateway/request/test_event_ids.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.core.errors import InvalidRequestError

HEADER = "last-event-id"

MAX_TAIL = 1024
"""Tokens that an id names itself, since headers end at 8 KiB. Where the journal is farther behind,
events have an empty id, which makes clients forget the last one: it would repeat tokens."""

MAX_CHOICES = 16
"""Every id has a place for each choice; calls with more of them cannot be resumed."""

_KEY, _START = r"[A-Za-z0-9_-]{8,64}", r"[A-Za-z0-9_-]{1,1024}"
_ID = re.compile(rf"({_KEY})(?:\.({_START}))?:([0-9a-f~.,!]*)(\$?)")
_PLACE = re.compile(r"([0-9]{1,9})(?:~([0-9]{1,9}))?((?:\.[0-9a-f]{1,8})*)(!?)")


class Place:
    """Where one choice is.

    Args:
        num_tokens: that the client has already.
        waiting: the last ones of them, which no journal may hold.

    Attributes:
        num_tokens: that the client has after this event.
        waiting: the last ones of them, which the journal may not hold yet.
        tail: what ids say of these and of cached tokens.
        cached: tokens of its prompt, if the journal may not hold that yet.
        is_opened: some event was sent.
        is_complete: the last event was sent.
    """

    __slots__ = ("cached", "is_complete", "is_opened", "num_tokens", "tail", "waiting")

    def __init__(self, num_tokens: int = 0, waiting: Sequence[int] = ()) -> None:
        self.num_tokens = num_tokens
        self.waiting = list(waiting)
        self.cached: int | None = None
        self.is_opened = num_tokens > 0
        self.is_complete = False
        self.tail = ""
        self._note_tail()

    @property
    def text(self) -> str:
        """The place as ids have it."""
        if not self.is_opened:
            return ""
        return f"{self.num_tokens}{self.tail}{'!' if self.is_complete else ''}"

    def add(self, token_ids: Sequence[int]) -> str:
        """The next event has these tokens, too; the place after it. All tokens pass here."""
        self.num_tokens = count = self.num_tokens + len(token_ids)
        self.waiting += token_ids
        tail = self.tail
        for token_id in token_ids:
            tail = f"{tail}.{token_id:x}"
        self.tail = tail
        self.is_opened = True
        return f"{count}{tail}"

    def open(self) -> None:
        """An event is sent."""
        self.is_opened = True

    def complete(self) -> None:
        """The last event is sent."""
        self.is_opened = self.is_complete = True

    def has_cached(self, num_tokens: int) -> None:
        """So many of the prompt's tokens were cached; before there are any tokens."""
        self.cached = num_tokens
        self._note_tail()

    def kept(self, num_tokens: int) -> None:
        """The journal holds so many of those that were waiting, and the number of cached ones."""
        del self.waiting[:num_tokens]
        self.cached = None
        self._note_tail()

    def _note_tail(self) -> None:
        cached = "" if self.cached is None else f"~{self.cached}"
        self.tail = cached + "".join([f".{token_id:x}" for token_id in self.waiting])


def id_line(name: str, places: Sequence[Place], *, is_over: bool = False) -> str:
    """The line of an event that says where the stream is after it.

    Args:
        name: its key, with its start where that is needed.
    """
    if sum([len(place.waiting) for place in places]) > MAX_TAIL:
        return "id:\n"
    return f"id: {name}:{','.join([place.text for place in places])}{'$' if is_over else ''}\n"


class GivenPlace(NamedTuple):
    """Where a client is in one choice.

    Attributes:
        num_kept: tokens that the journal must hold.
        tail: tokens behind these.
        cached: tokens of the prompt; None where the journal holds that.
    """

    num_kept: int
    tail: tuple[int, ...]
    cached: int | None
    is_opened: bool
    is_complete: bool


class GivenId(NamedTuple):
    """Where a client is in a stream.

    Attributes:
        start: how it began, as `stream_head` writes it; empty where the journal holds that.
    """

    key: str
    start: str
    places: tuple[GivenPlace, ...]
    is_over: bool

    @property
    def name(self) -> str:
        """The stream as the id names it."""
        return f"{self.key}.{self.start}" if self.start else self.key

    @property
    def is_whole(self) -> bool:
        """Whether it says all that there is to know, but for the request."""
        return bool(self.start) and not any(place.num_kept for place in self.places)


def parse_id(text: str) -> GivenId:
    """What `Last-Event-ID` says.

    Raises:
        InvalidRequestError: it is no id of ours.
    """
    found = _ID.fullmatch(text)
    parts = [] if found is None else found[3].split(",")
    places = [_place(part) for part in parts if len(parts) <= MAX_CHOICES]
    if found is None or not places or None in places:
        raise InvalidRequestError(f"Last-Event-ID: {text[:80]!r} is no id of an event", HEADER)
    given = tuple(place for place in places if place)
    return GivenId(found[1], found[2] or "", given, bool(found[4]))


def _place(text: str) -> GivenPlace | None:
    if not text:
        return GivenPlace(0, (), None, is_opened=False, is_complete=False)
    found = _PLACE.fullmatch(text)
    if found is None:
        return None
    tail = tuple(int(token_id, 16) for token_id in found[3].split(".")[1:])
    cached = None if found[2] is None else int(found[2])
    num_kept = int(found[1]) - len(tail)
    if num_kept < 0:
        return None
    return GivenPlace(num_kept, tail, cached, is_opened=True, is_complete=bool(found[4]))
