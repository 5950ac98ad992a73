"""Separates one generation into pieces of thinking, text and calls, in their order.

Pure. Tests: tests/unit/gateway/tools/test_pieces.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from services.gateway.tools.reasoning import Thoughts
from services.gateway.tools.scanner import CallArguments, CallStart, Content, Piece
from services.gateway.tools.tools import ToolReader


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's thinking."""

    text: str


AnyPiece: TypeAlias = Piece | Thought


class PieceReader:
    """Reads one generation.

    Args:
        thoughts: separates the thinking; None if the text is not searched for it.
        tools: finds tool calls; None if no tool may be called.
    """

    def __init__(self, thoughts: Thoughts | None, tools: ToolReader | None) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self._in_call = False
        self._num_calls = 0

    def read(self, text: str, *, last: bool) -> list[AnyPiece]:
        """Adds text; returns its pieces. Only starts of calls have no text.

        Args:
            last: this is the end of the text.
        """
        thought = ""
        if self._thoughts is not None:
            thought, text = self._thoughts.told(0, text, last=last)
        pieces: list[AnyPiece] = [Content(text)]
        if self._tools is not None:
            pieces = [*self._tools.read(text, last=last)]
        if thought:
            pieces.insert(self._end_of_call(pieces), Thought(thought))
        pieces = [each for each in pieces if isinstance(each, CallStart) or each.text]
        if pieces:
            self._in_call = isinstance(pieces[-1], CallStart | CallArguments)
        return pieces

    def call_id(self, start: CallStart) -> str:
        """The id of a new call: the model's own, or the next generated one."""
        assert self._tools is not None, "who found the call"
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return start.call_id or self._tools.call_id(number)

    def _end_of_call(self, pieces: list[AnyPiece]) -> int:
        """The number of leading pieces that belong to the open call, which the thinking ends."""
        if not self._in_call:
            return 0
        ends = (at for at, each in enumerate(pieces) if not isinstance(each, CallArguments))
        return next(ends, len(pieces))
