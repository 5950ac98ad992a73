"""Base classes of parsers for calls that follow a mark in the text.

Pure. Tests: tests/unit/gateway/tools/test_parsers.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from services.gateway.tools.scanner import MarkedText, Piece


class MarkedCalls(ABC):
    """Passes on text up to a mark, and the text after it to `_read`, in turn.

    White space after a section that `_leave` ended is dropped.
    """

    def __init__(self, mark: str) -> None:
        self._text = MarkedText(mark)
        self._inside = False
        self._after = False

    def push(self, text: str) -> list[Piece]:
        """See `ToolParser.push`."""
        pieces: list[Piece] = []
        rest: str | None = text
        while rest:
            if self._inside:
                found, rest = self._read(rest)
            else:
                rest = rest.lstrip() if self._after else rest
                self._after &= not rest
                found, rest = self._text.push(rest)
                self._inside = rest is not None
            pieces += found
        return pieces

    def finish(self) -> list[Piece]:
        """See `ToolParser.finish`."""
        return [] if self._inside else self._text.finish()

    @abstractmethod
    def _read(self, text: str) -> tuple[list[Piece], str]:
        """Reads text after the mark. Returns pieces, and the text that is still to be read."""

    def _leave(self) -> None:
        self._inside, self._after = False, True


class SteppedCalls(MarkedCalls):
    """Reads mark by mark: one `_step` per mark, when `_held` has the whole mark."""

    def __init__(self, mark: str) -> None:
        super().__init__(mark)
        self._held = ""

    def _read(self, text: str) -> tuple[list[Piece], str]:
        self._held += text
        pieces: list[Piece] = []
        while self._inside and (found := self._step()) is not None:
            pieces += found
        if self._inside:
            return pieces, ""
        rest, self._held = self._held, ""
        return pieces, rest

    @abstractmethod
    def _step(self) -> list[Piece] | None:
        """Reads the next mark; returns its pieces, or None if it is incomplete."""
