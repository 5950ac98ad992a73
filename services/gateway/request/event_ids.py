"""The format of a stream's event ids, with which a client resumes the stream at any gateway.

    <key>[.<start>]:<place>[,<place>...][$]

Each event's `id` tells the client's position in the stream; the client returns it in
`Last-Event-ID`. The key names the stream in the journal and cannot be guessed. The start
(`stream_head`) is present while the journal may not hold the stream yet. There is one place per
choice, empty before the choice's first event. A place consists of:

- the number of the choice's tokens that the journal holds;
- `~` and the number of the prompt's cached tokens, if the journal may not hold it yet;
- the tokens that follow in hex, each after a dot: the journal may not hold them yet;
- `!` if the choice is complete.

`$` means that the client also has the usage that follows all choices.
Example: `Fh2bW…:5.1f.a0!` is a stream of one choice, complete after 7 tokens; the journal holds 5.
Pure. Tests: tests/unit/gateway/request/test_event_ids.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.core.errors import InvalidRequestError

HEADER = "last-event-id"

MAX_TAIL = 1024
"""Maximum number of tokens in an id, since headers end at 8 KiB.

If the journal is farther behind, events have an empty id. An empty id makes the client forget the
last one, which would repeat tokens.
"""

MAX_CHOICES = 16
"""Maximum number of choices.

Every id has a place for each choice; a call with more choices cannot be resumed.
"""

_KEY, _START = r"[A-Za-z0-9_-]{8,64}", r"[A-Za-z0-9_-]{1,1024}"
_ID = re.compile(rf"({_KEY})(?:\.({_START}))?:([0-9a-f~.,!]*)(\$?)")
_PLACE = re.compile(r"([0-9]{1,9})(?:~([0-9]{1,9}))?((?:\.[0-9a-f]{1,8})*)(!?)")


class Place:
    """The position in one choice.

    Args:
        num_tokens: number of tokens that the client already has.
        waiting: the last ones of them, which no journal may hold.

    Attributes:
        num_kept: number of tokens that the journal holds.
        waiting: the tokens after them, which it may not hold yet.
        cached: number of cached prompt tokens, if the journal may not hold it yet.
        told: all of this in the format of an id.
        is_opened: some event was sent.
        is_complete: the last event was sent.
    """

    __slots__ = ("cached", "is_complete", "is_opened", "num_kept", "told", "waiting")

    def __init__(self, num_tokens: int = 0, waiting: Sequence[int] = ()) -> None:
        self.num_kept = num_tokens - len(waiting)
        self.waiting = list(waiting)
        self.cached: int | None = None
        self.is_opened = num_tokens > 0
        self.is_complete = False
        self.told = ""
        self._tell()

    @property
    def text(self) -> str:
        """The place in the format of an id."""
        if not self.is_opened:
            return ""
        return f"{self.told}!" if self.is_complete else self.told

    def add(self, token_ids: Sequence[int]) -> int:
        """Adds the next event's tokens; returns the number waiting. Called for all tokens."""
        self.is_opened = True
        self.waiting += token_ids
        # Nearly all events have one token.
        is_one = len(token_ids) == 1
        self.told += f".{token_ids[0]:x}" if is_one else _tail_text(token_ids)
        return len(self.waiting)

    def open(self) -> None:
        """Notes that an event was sent."""
        self.is_opened = True

    def complete(self) -> None:
        """Notes that the last event was sent."""
        self.is_opened = self.is_complete = True

    def has_cached(self, num_tokens: int) -> None:
        """Sets the number of cached prompt tokens; called before any token."""
        self.cached = num_tokens
        self._tell()

    def kept(self, num_tokens: int) -> None:
        """Notes that the journal holds the first `num_tokens` waiting tokens, and `cached`."""
        self.num_kept += num_tokens
        del self.waiting[:num_tokens]
        self.cached = None
        self._tell()

    def _tell(self) -> None:
        cached = "" if self.cached is None else f"~{self.cached}"
        self.told = f"{self.num_kept}{cached}{_tail_text(self.waiting)}"


def _tail_text(token_ids: Sequence[int]) -> str:
    """Writes tokens as in a place. One call for all takes a third of one for each."""
    return ".%x" * len(token_ids) % (*token_ids,)


def id_line(name: str, places: Sequence[Place], *, is_over: bool = False) -> str:
    """The `id` line of an event: the position in the stream after that event.

    Args:
        name: the stream's key, followed by its start if the journal may not hold the stream.
    """
    if sum([len(place.waiting) for place in places]) > MAX_TAIL:
        return "id:\n"
    return f"id: {name}:{','.join([place.text for place in places])}{'$' if is_over else ''}\n"


class GivenPlace(NamedTuple):
    """A client's position in one choice, as parsed from an id.

    Attributes:
        num_kept: number of tokens that the journal must hold.
        tail: the tokens after these.
        cached: number of cached prompt tokens; None if the journal holds it.
    """

    num_kept: int
    tail: tuple[int, ...]
    cached: int | None
    is_opened: bool
    is_complete: bool


class GivenId(NamedTuple):
    """A client's position in a stream, as parsed from an id.

    Attributes:
        start: how the stream began, as `stream_head` writes it; empty if the journal holds that.
    """

    key: str
    start: str
    places: tuple[GivenPlace, ...]
    is_over: bool

    @property
    def name(self) -> str:
        """The name of the stream in its ids."""
        return f"{self.key}.{self.start}" if self.start else self.key

    @property
    def is_whole(self) -> bool:
        """Whether the id alone, with the client's request, suffices to continue the stream."""
        return bool(self.start) and not any(place.num_kept for place in self.places)


def parse_id(text: str) -> GivenId:
    """Parses the value of `Last-Event-ID`.

    Raises:
        InvalidRequestError: it is no id of this gateway's format.
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
    return GivenPlace(int(found[1]), tail, cached, is_opened=True, is_complete=bool(found[4]))
