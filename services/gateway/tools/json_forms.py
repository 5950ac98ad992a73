"""Tool calls as JSON objects: the formats of Hermes, Llama and Mistral, and forced calls.

Pure. Tests: tests/unit/gateway/tools/test_parsers.py.
"""

from __future__ import annotations

from collections.abc import Collection

from services.gateway.tools.marked import MarkedCalls
from services.gateway.tools.scanner import (
    CallArguments,
    CallScanner,
    CallStart,
    Content,
    JsonSpan,
    MarkedText,
    Piece,
    content_of,
)


def _unfinished(scanner: CallScanner | None, marker: str = "") -> list[Piece]:
    """The pieces of a call that never ended. Without a name, it is text."""
    if scanner is None or scanner.name or scanner.done:
        return []
    return content_of(marker + scanner.raw)


class HermesParser(MarkedCalls):
    """Calls between `<tool_call>` and `</tool_call>`."""

    _START, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__(self._START)
        self._scanner: CallScanner | None = None
        self._tail = ""  # text inside the marks before or after the object

    def _read(self, text: str) -> tuple[list[Piece], str]:
        if self._scanner is None:
            self._tail += text
            begins = self._tail.lstrip()
            if not begins:
                return [], ""
            if begins[0] != "{":
                return self._give_up()
            text, self._tail = begins, ""
            self._scanner = CallScanner()
        if not self._scanner.done:
            pieces, rest = self._scanner.push(text)
            if self._scanner.done and not self._scanner.name:
                pieces = [*pieces, Content(self._START + self._scanner.raw)]
            return pieces, rest
        return self._skip_end(text)

    def _skip_end(self, text: str) -> tuple[list[Piece], str]:
        """Reads to the end mark, or without one to the start of the next call."""
        self._tail = (self._tail + text).lstrip()
        if self._END.startswith(self._tail):
            if self._tail != self._END:
                return [], ""
            rest = ""
        else:
            rest = self._tail.removeprefix(self._END)
        self._scanner, self._tail = None, ""
        self._leave()
        return [], rest

    def _give_up(self) -> tuple[list[Piece], str]:
        """No object follows the mark, so the mark was text; the rest is searched again."""
        rest, self._tail, self._inside = self._tail, "", False
        return content_of(self._START), rest

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        return super().finish() or _unfinished(self._scanner, self._START)


class LlamaParser:
    """Reads an answer that is either all calls or all text.

    Args:
        names: names of the tools; a JSON object with another name is text.
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
            return content_of(text)
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
                return content_of(self._start)
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
            return [] if self._is_text else content_of(self._start)
        if self._scanner is None or self._scanner.done or self._scanner.name in self._names:
            return []
        return content_of(self._scanner.raw)


class CallList:
    """A JSON array of calls: Mistral's format, and the format of `tool_choice: required`."""

    def __init__(self) -> None:
        self._scanner: CallScanner | None = None
        self.done = False

    def push(self, text: str) -> tuple[list[Piece], str]:
        """Adds text. Returns new pieces, and the text after the array."""
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
        """Returns the rest, at the end of the text."""
        return _unfinished(self._scanner)


class RequiredParser:
    """Reads a text that is an array of calls."""

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
    """Reads a text that is the arguments of one function.

    Args:
        name: name of the function.
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
    """Reads calls after `[TOOL_CALLS]`, in either of Mistral's two formats."""

    _START = "[TOOL_CALLS]"
    _SEPARATORS = ("[CALL_ID]", "[ARGS]")

    def __init__(self) -> None:
        self._text = MarkedText(self._START)
        self._inside = False
        self._head = ""  # a name that is incomplete so far
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
        length = self._span.length_in(text)
        if self._span.depth == 0:
            self._inside, self._span = False, None
        return [CallArguments(text[:length])], text[length:]

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        if not self._inside:
            return self._text.finish()
        if self._list is not None:
            return self._list.finish()
        return content_of(self._START + self._head) if self._head else []
