"""The short way of a token: from the worker's message to the client's socket, in one call.

While a stream just goes on, its tokens need no task to wake up and no body to be built: the lane
turns them into text, puts the text into a chunk made once, and writes it. Whatever is not plain
(a last token, a gap, log-probabilities, a slow client) is refused here and takes the long way, so
the bytes that a client gets are the same. Tests: tests/unit/gateway/test_token_lane.py,
tests/integration/test_gateway_lane.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from services.gateway.detokenizer import Detokenizer
from services.gateway.mesh import Placed
from services.gateway.request_record import RequestRecord
from services.gateway.responses import ChoiceText

MAX_UNSENT_BYTES = 64 * 1024
"""A client that has this much to read yet is slow: its tokens wait for it on the long way."""

_MARK = "\0text\0"
_MARK_AS_JSON = json.dumps(_MARK)
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Writer(Protocol):
    """What the lane needs of a transport."""

    def write(self, data: bytes) -> None:
        """Sends or buffers."""
        ...

    def is_closing(self) -> bool:
        """Whether writing is pointless."""
        ...

    def get_write_buffer_size(self) -> int:
        """Bytes that are not sent yet."""
        ...


class ChunkTemplate:
    """A server-sent event in which only the text changes, as one HTTP chunk.

    Args:
        body_with: the event's body with a given text in it, once and at its place as a string.
    """

    def __init__(self, body_with: Callable[[str], Any]) -> None:
        # The text is the last field that a caller has a say in, so the last mark is ours.
        head, mark, self._tail = _to_json(body_with(_MARK)).rpartition(_MARK_AS_JSON)
        assert mark, "the text is part of the body"
        self._head = "data: " + head
        self._tail += "\n\n"

    def event(self, text: str) -> bytes:
        """The event with this text."""
        return (self._head + encode_basestring(text) + self._tail).encode()

    def chunk(self, text: str) -> bytes:
        """The event with its chunk's head and end."""
        event = (self._head + encode_basestring(text) + self._tail).encode()
        return b"%x\r\n%b\r\n" % (len(event), event)


Open = Callable[[bytes], None]
"""Sends the head of an answer together with its first events."""


class TokenLane:
    """One choice's lane; open from its first piece on the wire to its end.

    Attributes:
        detokenizer, record: the choice's own, shared with the long way.
        on_placed: told where the choice runs, before its first token can come; may `prepare`.
    """

    def __init__(self) -> None:
        self.detokenizer: Detokenizer | None = None
        self.record: RequestRecord | None = None
        self.on_placed: Callable[[TokenLane, Placed], None] | None = None
        self._writer: Writer | None = None
        self._opening: tuple[Writer, ChunkTemplate, ChoiceText, Open, bytes] | None = None

    @property
    def is_open(self) -> bool:
        """Whether tokens are let through."""
        return self._writer is not None

    def placed(self, where: Placed) -> None:
        """Says where the choice runs, while a worker has it and nothing came yet."""
        told, self.on_placed = self.on_placed, None
        if told is not None:
            told(self, where)

    def prepare(
        self,
        writer: Writer,
        template: ChunkTemplate,
        choice: ChoiceText,
        send: Open,
        opening: bytes,
    ) -> None:
        """Gets ready to begin the answer with the first tokens.

        Args:
            send: sends the answer's head and its first events.
            opening: the events before the first text.
        """
        self._opening = writer, template, choice, send, opening

    def first(self, token_ids: Sequence[int], now: float) -> bool:
        """Begins the answer, if that is prepared; as `push`, which may be called from then on."""
        if self._opening is None:
            return False
        writer, template, choice, send, opening = self._opening
        if writer.is_closing():
            return False
        assert self.record is not None, "prepared"
        assert self.detokenizer is not None, "prepared"
        self._opening = None
        text = self.detokenizer.plain(token_ids)
        send(opening + template.event(text) if text else opening)
        choice.token_ids.extend(token_ids)
        self.record.first(len(token_ids), now)
        self.open(writer, template, choice)
        return True

    def open(self, writer: Writer, template: ChunkTemplate, choice: ChoiceText) -> None:
        """Lets tokens through; all before them must be written."""
        assert self.detokenizer is not None, "text was sent"
        assert self.record is not None, "text was sent"
        # What `push` calls for every token, looked up once.
        self._text_of = self.detokenizer.plain
        self._count = self.record.tokens
        self._chunk = template.chunk
        self._keep = choice.token_ids.extend
        self._writer = writer

    def close(self) -> None:
        """Lets no more through. May be called again."""
        self._writer = self._opening = self.on_placed = None

    def push(self, token_ids: Sequence[int], now: float) -> bool:
        """Sends the text of the next tokens.

        Args:
            now: on the loop's clock.

        Returns:
            False when they have to go the long way; nothing has happened then.
        """
        writer = self._writer
        if (
            writer is None
            or writer.is_closing()
            or writer.get_write_buffer_size() > MAX_UNSENT_BYTES
        ):
            return False
        text = self._text_of(token_ids)
        self._keep(token_ids)
        if text:
            writer.write(self._chunk(text))
        self._count(len(token_ids), now)
        return True
