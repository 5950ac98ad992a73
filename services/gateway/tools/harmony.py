"""Harmony, gpt-oss's format of answers: messages in channels.

A generation is any number of `<|channel|>name<|message|>text<|end|><|start|>assistant`. Channel
`analysis` has the thinking, `final` the text for the caller, and `commentary` with
`to=functions.name` a call. `HarmonyReader` separates the thinking and passes calls on unchanged.
`HarmonyCalls` finds the calls in the rest. Pure. Tests: tests/unit/gateway/tools/test_harmony.py.
"""

from __future__ import annotations

import re

from services.gateway.tools.held_text import held_back
from services.gateway.tools.scanner import CallArguments, CallStart, MarkedText, Piece
from services.gateway.tools.told import Told

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HEADS = (START, CHANNEL, "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
ANALYSIS = CHANNEL + "analysis" + MESSAGE
"""The start of a generation with thinking."""

_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CALL = CHANNEL + "commentary to=functions."


class HarmonyReader:
    """Separates the thinking from the answer of one generation."""

    def __init__(self) -> None:
        self._held = ""
        self._channel = ""  # of the current message; empty between messages

    @property
    def is_answer(self) -> bool:
        """Whether all further text is the answer: `final` is the last message."""
        return self._channel == "final"

    def push(self, text: str) -> Told:
        """Adds text; returns the part of it that is decided now."""
        self._held += text
        told = Told("", "")
        while (more := self._step()) is not None:
            told = Told(told.reasoning + more.reasoning, told.answer + more.answer)
        return told

    def _step(self) -> Told | None:
        return self._read() if self._channel else self._open()

    def _open(self) -> Told | None:
        """Reads the head of a message."""
        text = self._held.lstrip()
        if text and not any(_may_begin(text, mark) for mark in _HEADS):
            self._channel = "final"  # not a message: the prompt was not in Harmony
            return Told("", "")
        head, is_complete, rest = self._held.partition(MESSAGE)
        if not is_complete:
            return None
        self._held = rest
        recipient = _RECIPIENT.search(head)
        if recipient is not None:
            self._channel = "call"
            return Told("", f"{_CALL}{recipient[1]}{MESSAGE}")
        is_thinking = head.partition(CHANNEL)[2].startswith("analysis")
        is_final = head.partition(CHANNEL)[2].startswith("final")
        self._channel = "analysis" if is_thinking else "final" if is_final else "commentary"
        return Told("", "")

    def _read(self) -> Told | None:
        """Continues with the current message."""
        if not self._held:
            return None
        found = [(at, end) for end in _ENDS if (at := self._held.find(end)) >= 0]
        if found:
            at, end = min(found)
            told = self._told(self._held[:at])
            self._held = self._held[at + len(end) :]
            answer = told.answer + _ENDS[1] if self._channel == "call" else told.answer
            self._channel = ""
            return Told(told.reasoning, answer)
        sure = len(self._held) - max(held_back(self._held, end) for end in _ENDS)
        if not sure:
            return None
        text, self._held = self._held[:sure], self._held[sure:]
        return self._told(text)

    def _told(self, text: str) -> Told:
        return Told(text, "") if self._channel == "analysis" else Told("", text)

    def finish(self) -> Told:
        """Returns the rest, at the end of the text."""
        held, self._held = self._held, ""
        # A message that ends within its head has no text.
        return self._told(held) if self._channel else Told("", "")


class HarmonyCalls:
    """Finds the calls in text that `HarmonyReader` has passed on."""

    def __init__(self) -> None:
        self._text = MarkedText(_CALL)
        self._inside = False
        self._held = ""
        self._has_name = False
        self._has_arguments = False

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if not self._inside:
                found, rest = self._text.push(rest)
                self._inside = rest is not None
            else:
                found, rest = self._read(rest)
            pieces += found
        return pieces

    def _read(self, text: str) -> tuple[list[Piece], str]:
        self._held += text
        pieces: list[Piece] = []
        if not self._has_name:
            name, self._has_name, rest = _split(self._held, MESSAGE)
            if not self._has_name:
                return [], ""
            self._held = rest
            pieces.append(CallStart(name))
        arguments, is_complete, rest = _split(self._held, _ENDS[1])
        if is_complete:
            pieces += self._arguments(arguments)
            if not self._has_arguments:
                pieces.append(CallArguments("{}"))
            self._held, self._inside, self._has_name, self._has_arguments = "", False, False, False
            return pieces, rest
        sure = len(self._held) - held_back(self._held, _ENDS[1])
        pieces += self._arguments(self._held[:sure])
        self._held = self._held[sure:]
        return pieces, ""

    def _arguments(self, text: str) -> list[Piece]:
        if not self._has_arguments:
            text = text.lstrip()
        self._has_arguments |= bool(text)
        return [CallArguments(text)] if text else []

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        if not self._inside:
            return self._text.finish()
        # The mark that ends a call also ends the generation, so the text lacks it.
        pieces = self._read(_ENDS[1])[0] if self._has_name else []
        self._inside = False
        return pieces


def _may_begin(text: str, mark: str) -> bool:
    """Whether the text is a prefix of the mark or begins with it."""
    return text.startswith(mark) or mark.startswith(text)


def _split(text: str, mark: str) -> tuple[str, bool, str]:
    before, found, after = text.partition(mark)
    return before, bool(found), after
