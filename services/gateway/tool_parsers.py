"""Tool calls in a model's text, one parser per family of chat templates.

Parsers take text in pieces of any size and say at once what is sure, so a stream and a whole answer
are read by the same code. Pure. Tests: tests/unit/gateway/test_tool_parsers.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol

from kvmesh.core.errors import ConfigError
from services.gateway.tool_scanner import (
    CallArguments,
    CallScanner,
    CallStart,
    Content,
    JsonSpan,
    Piece,
    held_back,
)


class ToolFamily(enum.Enum):
    """How a model writes calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen."""
    LLAMA3_JSON = "llama3_json"
    """The whole answer is `{"name": …, "parameters": …}`: Llama 3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name{…}`: Mistral."""


def family_of_template(source: str) -> ToolFamily | None:
    """The family that a chat template is of; None if it knows no tools."""
    if "<tool_call>" in source:
        return ToolFamily.HERMES
    if "[TOOL_CALLS]" in source:
        return ToolFamily.MISTRAL
    if "<|python_tag|>" in source or '"parameters": dictionary' in source:
        return ToolFamily.LLAMA3_JSON
    return None


def family_named(word: str, source: str) -> ToolFamily | None:
    """The family that a config names; `auto` reads it off the chat template.

    Raises:
        ConfigError: another word.
    """
    if word == "auto":
        return family_of_template(source)
    if word == "none":
        return None
    words = {family.value: family for family in ToolFamily}
    if word not in words:
        allowed = ", ".join(["auto", *words, "none"])
        raise ConfigError(f"model.tool_calls must be one of {allowed}, got {word!r}")
    return words[word]


class ToolParser(Protocol):
    """Reads one generation."""

    def push(self, text: str) -> list[Piece]:
        """What more text says."""
        ...

    def finish(self) -> list[Piece]:
        """What is left when the text ends."""
        ...


def parser_for(family: ToolFamily, names: Collection[str]) -> ToolParser:
    """A parser for free text with calls in it.

    Args:
        names: of the tools that there are.
    """
    if family is ToolFamily.HERMES:
        return HermesParser()
    return MistralParser() if family is ToolFamily.MISTRAL else LlamaParser(names)


class _MarkedText:
    """Text up to a marker; white space right before the marker is dropped."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str) -> tuple[list[Piece], str | None]:
        """What may be shown, and what follows the marker once it came."""
        text = self._held + text
        before, found, after = text.partition(self._marker)
        if found:
            self._held = ""
            return _content(before.rstrip()), after
        sure = len(text) - held_back(text, self._marker)
        shown = text[:sure].rstrip()
        self._held = text[len(shown) :]
        return _content(shown), None

    def finish(self) -> list[Piece]:
        """No marker came any more."""
        held, self._held = self._held, ""
        return _content(held)


def _content(text: str) -> list[Piece]:
    return [Content(text)] if text else []


def _unfinished(scanner: CallScanner | None, marker: str = "") -> list[Piece]:
    """What to do with a call that never ended: without a name it was text."""
    if scanner is None or scanner.name or scanner.done:
        return []
    return _content(marker + scanner.raw)


class HermesParser:
    """Calls between `<tool_call>` and `</tool_call>`."""

    _START, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._text = _MarkedText(self._START)
        self._scanner: CallScanner | None = None
        self._inside = False
        self._tail = ""  # text inside the marks before or after the object
        self._after_call = False  # white space between calls is dropped

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if not self._inside:
                rest = rest.lstrip() if self._after_call else rest
                self._after_call &= not rest
                found, rest = self._text.push(rest)
                pieces += found
                self._inside = rest is not None
            else:
                found, rest = self._read_call(rest)
                pieces += found
        return pieces

    def _read_call(self, text: str) -> tuple[list[Piece], str]:
        if self._scanner is None:
            self._tail = (self._tail + text).lstrip()
            if not self._tail:
                return [], ""
            if self._tail[0] != "{":
                return self._give_up()
            text, self._tail = self._tail, ""
            self._scanner = CallScanner()
        if not self._scanner.done:
            pieces, rest = self._scanner.push(text)
            if self._scanner.done and not self._scanner.name:
                pieces = [*pieces, Content(self._START + self._scanner.raw)]
            return pieces, rest
        return self._skip_end(text)

    def _skip_end(self, text: str) -> tuple[list[Piece], str]:
        """Reads to the end mark, or to where the next call begins without one."""
        self._tail = (self._tail + text).lstrip()
        if self._END.startswith(self._tail):
            if self._tail != self._END:
                return [], ""
            rest = ""
        else:
            rest = self._tail.removeprefix(self._END)
        self._scanner, self._inside, self._tail = None, False, ""
        self._after_call = True
        return [], rest

    def _give_up(self) -> tuple[list[Piece], str]:
        """No object follows the mark: it was text."""
        pieces = _content(self._START + self._tail)
        self._inside, self._tail = False, ""
        return pieces, ""

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        if not self._inside:
            return self._text.finish()
        return _unfinished(self._scanner, self._START)


class LlamaParser:
    """The answer is calls from its start to its end, or text.

    Args:
        names: a JSON object that names none of these is text.
    """

    _TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._start: str | None = ""
        self._is_text = False
        self._scanner: CallScanner | None = None

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        if self._is_text:
            return _content(text)
        if self._start is not None:
            self._start += text
            ready = self._start.lstrip()
            if not ready or self._TAG.startswith(ready):
                return []
            text = ready.removeprefix(self._TAG).lstrip()
            if not text:
                return []
            if text[0] != "{":
                self._is_text = True
                return _content(self._start)
            self._start = None
        return self._read_calls(text)

    def _read_calls(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._scanner is None or self._scanner.done:
                text = text.lstrip(" \n\t;,")
                if not text:
                    break
                if text[0] != "{":
                    self._is_text = True
                    return [*pieces, Content(text)]
                self._scanner = CallScanner()
            found, text = self._scanner.push(text)
            scanner = self._scanner
            if scanner.name in self._names:
                pieces += found
            elif scanner.done:
                self._is_text = True
                return [*pieces, Content(scanner.raw + text)]
        return pieces

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        if self._start is not None:
            return [] if self._is_text else _content(self._start)
        if self._scanner is None or self._scanner.done or self._scanner.name in self._names:
            return []
        return _content(self._scanner.raw)


class CallList:
    """A JSON array of calls: Mistral's, and what `tool_choice: required` makes a model write."""

    def __init__(self) -> None:
        self._scanner: CallScanner | None = None
        self.done = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        """What is new, and the text after the array."""
        pieces: list[Piece] = []
        while text and not self.done:
            if self._scanner is None or self._scanner.done:
                text = text.lstrip(" \n\t,[")
                if not text:
                    break
                if text[0] != "{":
                    self.done = True
                    return pieces, text[1:]
                self._scanner = CallScanner()
            found, text = self._scanner.push(text)
            pieces += found
        return pieces, text

    def finish(self) -> list[Piece]:
        """What is left when the text ends."""
        return _unfinished(self._scanner)


class RequiredParser:
    """The whole text is an array of calls."""

    def __init__(self) -> None:
        self._calls = CallList()

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        pieces, _ = self._calls.push(text)
        return pieces

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        return self._calls.finish()


class NamedParser:
    """The whole text is the arguments of one function.

    Args:
        name: of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        if not text:
            return []
        pieces: list[Piece] = [] if self._started else [CallStart(self._name)]
        self._started = True
        return [*pieces, CallArguments(text)]

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        return []


class MistralParser:
    """Calls after `[TOOL_CALLS]`, in either of Mistral's two forms."""

    _START = "[TOOL_CALLS]"
    _SEPARATORS = ("[CALL_ID]", "[ARGS]")

    def __init__(self) -> None:
        self._text = _MarkedText(self._START)
        self._inside = False
        self._head = ""  # a name that is not complete yet
        self._list: CallList | None = None
        self._span: JsonSpan | None = None

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if not self._inside:
                found, rest = self._text.push(rest)
                self._inside = rest is not None
            elif self._list is not None:
                found, rest = self._list.push(rest)
                if self._list.done:
                    self._inside, self._list = False, None
            elif self._span is not None:
                found, rest = self._arguments(rest)
            else:
                found, rest = self._open(rest)
            pieces += found
        return pieces

    def _open(self, text: str) -> tuple[list[Piece], str]:
        self._head = (self._head + text).lstrip()
        if not self._head:
            return [], ""
        if self._head[0] == "[":
            self._list = CallList()
            text, self._head = self._head, ""
            return [], text
        name, brace, rest = self._head.partition("{")
        if not brace:
            return [], ""
        for separator in self._SEPARATORS:
            name = name.partition(separator)[0]
        self._head, self._span = "", JsonSpan()
        return [CallStart(name.strip())], brace + rest

    def _arguments(self, text: str) -> tuple[list[Piece], str]:
        assert self._span is not None
        for index, char in enumerate(text):
            self._span.step(char)
            if self._span.depth == 0:
                self._inside, self._span = False, None
                return [CallArguments(text[: index + 1])], text[index + 1 :]
        return [CallArguments(text)], ""

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        if not self._inside:
            return self._text.finish()
        if self._list is not None:
            return self._list.finish()
        return _content(self._START + self._head) if self._head else []
