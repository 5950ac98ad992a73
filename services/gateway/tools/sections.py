"""Tool calls in a marked section: the formats of DeepSeek, Kimi and MiniMax.

Pure. Tests: tests/unit/gateway/tools/test_parsers.py.
"""

from __future__ import annotations

import enum

from services.gateway.tools.held_text import held_back
from services.gateway.tools.marked import MarkedCalls
from services.gateway.tools.scanner import (
    CallArguments,
    CallScanner,
    CallStart,
    Content,
    JsonSpan,
    Piece,
)


class SectionMarks(enum.Enum):
    """The marks around the section, and around each call in it."""

    DEEPSEEK = (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    )
    """`name, separator, {…}`, or `function, separator, name`, and the object in a code fence."""
    KIMI = (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    )
    """`functions.name:0`, which is also the call's id, then `{…}`."""

    def __init__(self, start: str, end: str, call: str, call_end: str, separator: str) -> None:
        self.start = start
        self.end = end
        self.call = call
        self.call_end = call_end
        self.separator = separator


class SectionParser(MarkedCalls):
    """Reads calls between marks, with the name before the object of arguments."""

    def __init__(self, marks: SectionMarks) -> None:
        super().__init__(marks.start)
        self._marks = marks
        self._head = ""  # the current call's text before its arguments
        self._span: JsonSpan | None = None

    def _read(self, text: str) -> tuple[list[Piece], str]:
        return self._open(text) if self._span is None else self._arguments(self._span, text)

    def _open(self, text: str) -> tuple[list[Piece], str]:
        """Reads to the next call's arguments, or to the section's end."""
        marks = self._marks
        self._head += text
        before, mark, after = _cut(self._head, (marks.call, marks.end))
        if mark == marks.call:
            before, mark, after = _cut(after, ("{", marks.call_end, marks.end))
        if not mark:
            return [], ""
        self._head = ""
        if mark == marks.end:
            self._leave()
            return [], after
        if mark == "{":
            self._span = JsonSpan()
            return [self._start(before)], mark + after
        return [self._start(before), CallArguments("{}")], after

    def _start(self, header: str) -> CallStart:
        first, _, second = header.partition(self._marks.separator)
        first, second = first.strip(), second.strip()
        if self._marks is SectionMarks.KIMI:
            name = first.removeprefix("functions.").rpartition(":")[0] or first
            return CallStart(name, first)
        # The code fence around the object has lines of its own.
        return CallStart(second.partition("\n")[0].strip() or first)

    def _arguments(self, span: JsonSpan, text: str) -> tuple[list[Piece], str]:
        length = span.length_in(text)
        if span.depth == 0:
            self._span = None
        return [CallArguments(text[:length])], text[length:]


def _cut(text: str, marks: tuple[str, ...]) -> tuple[str, str, str]:
    """Splits a text before, at and after the first mark; without a mark, all of it is before."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not found:
        return text, "", ""
    at, mark = min(found)
    return text[:at], mark, text[at + len(mark) :]


class TaggedListParser(MarkedCalls):
    """Reads objects with a name and arguments, one after the other between two tags: MiniMax."""

    _START, _END = "<tool_calls>", "</tool_calls>"

    def __init__(self) -> None:
        super().__init__(self._START)
        self._scanner: CallScanner | None = None
        self._between = ""

    def _read(self, text: str) -> tuple[list[Piece], str]:
        scanner = self._scanner
        if scanner is None:
            return self._next(text)
        pieces, rest = scanner.push(text)
        if scanner.done:
            self._scanner = None
        return pieces, rest

    def _next(self, text: str) -> tuple[list[Piece], str]:
        """Reads to the next object, or to the end tag."""
        self._between += text
        _, end, rest = self._between.partition(self._END)
        at = self._between.find("{")
        if at >= 0 and (not end or at < self._between.index(self._END)):
            self._scanner = CallScanner()
            text, self._between = self._between[at:], ""
            return [], text
        if end:
            self._between = ""
            self._leave()
            return [], rest
        self._between = self._between[len(self._between) - held_back(self._between, self._END) :]
        return [], ""

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        if not self._inside:
            return self._text.finish()
        if self._scanner is None or self._scanner.name:
            return []
        return [Content(self._scanner.raw)]
