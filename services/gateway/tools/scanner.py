"""Parses one tool call, a JSON object with a name and arguments, from text in pieces.

Arguments are passed on as the model wrote them, as soon as the name is known.
Pure. Tests: tests/unit/gateway/tools/test_parsers.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.gateway.api.json_input import json_value
from services.gateway.tools.held_text import HeldText

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer, outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call; the arguments that follow belong to it.

    Attributes:
        call_id: the model's own id of the call, if it wrote one.
    """

    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More arguments of the latest call: a part of a JSON object."""

    text: str


Piece: TypeAlias = Content | CallStart | CallArguments


class JsonSpan:
    """Finds the end of a JSON object or array."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def step(self, char: str) -> None:
        """Reads one character."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self.in_string = False
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1

    def length_in(self, text: str) -> int:
        """Reads up to the end of the value. Returns its length in the text."""
        for index, char in enumerate(text):
            self.step(char)
            if self.depth == 0:
                return index + 1
        return len(text)


class CallScanner:
    """Reads `{"name": …, "arguments": {…}}`; keys in any order, or with the key `parameters`.

    Attributes:
        name: name of the function, once it is known.
        done: the object is closed.
    """

    def __init__(self) -> None:
        self.name = ""
        self.done = False
        # Lists: arguments may be as long as a file, and appending to such a string is slow.
        self._read: list[str] = []
        self._span = JsonSpan()
        self._key = ""
        self._string: list[str] = []  # the current string with its quotes
        self._value: list[str] = []  # arguments that were read but not passed on yet
        self._value_begin = ""  # first character of the value
        self._space: list[str] = []  # white space after the value; part of it if more follows
        self._has_started = False
        self._in_arguments = False
        self._is_value = False

    @property
    def raw(self) -> str:
        """Everything read so far."""
        return "".join(self._read)

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Adds text.

        Returns:
            The new pieces, and the text after the object.
        """
        for index, char in enumerate(text):
            self._step(char)
            if self.done:
                self._read.append(text[: index + 1])
                return self._news(), text[index + 1 :]
        self._read.append(text)
        return self._news(), ""

    def _step(self, char: str) -> None:
        span = self._span
        before, was_string = span.depth, span.in_string
        span.step(char)
        self.done = span.depth == 0
        if before == 1 and span.depth == 1 and (was_string or span.in_string):
            if not was_string:
                self._string.clear()
            self._string.append(char)
            if not span.in_string:
                self._take_string()
        elif span.depth == 1 and char == ":":
            self._is_value = True
            self._in_arguments = self._key in _ARGUMENTS
            return
        elif before == 1 and char == ",":
            self._is_value = self._in_arguments = False
        if self._in_arguments and not self.done:
            self._take_value(char)

    def _take_value(self, char: str) -> None:
        if char.isspace():
            if self._value_begin:
                self._space.append(char)
            return
        self._value_begin = self._value_begin or char
        self._value += self._space
        self._space.clear()
        self._value.append(char)

    def _take_string(self) -> None:
        try:
            text = json_value("".join(self._string))
        except ValueError:
            return  # invalid JSON or a lone surrogate; without a name, it ends as text
        if not self._is_value:
            self._key = text
        elif self._key == "name":
            self.name = text

    def _news(self) -> list[Piece]:
        pieces: list[Piece] = []
        if not self.name:
            return pieces
        arguments = self._arguments()
        if arguments and not self._has_started:
            self._has_started = True
            pieces.append(CallStart(self.name))
        if arguments:
            pieces.append(CallArguments(arguments))
        return pieces

    def _arguments(self) -> str:
        """Arguments that are decided but were not passed on yet."""
        if self._value_begin == "{":
            sure = "".join(self._value)
            self._value.clear()
            return sure
        if not self.done:
            return ""  # not an object: passed on when it is complete
        try:
            plain = json_value("".join(self._value) or "null")
        except ValueError:
            plain = None
        return plain if isinstance(plain, str) and plain else "{}"


class MarkedText:
    """The answer's text up to a marker. White space directly before the marker is dropped."""

    def __init__(self, marker: str) -> None:
        self._held = HeldText(marker)

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        """Adds text. Returns text that may be sent, and the text after a complete marker."""
        shown, after = self._held.push(text)
        return content_of(shown), after

    def finish(self) -> list[Piece]:
        """Returns the held text, if no marker arrived."""
        return content_of(self._held.finish())


def content_of(text: str) -> list[Piece]:
    """Wraps text as a piece, unless it is empty."""
    return [Content(text)] if text else []
