"""One generation read for thinking, text and calls, as pieces in the order in which they came.

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
    """Text that the model thought."""

    text: str


AnyPiece: TypeAlias = Piece | Thought


class PieceReader:
    """Reads one generation.

    Args:
        thoughts: tells thinking apart; None where the text is not read for it.
        tools: finds calls; None where there are none to be made.
    """

    def __init__(self, thoughts: Thoughts | None, tools: ToolReader | None) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self._in_call = False
        self._num_calls = 0

    def read(self, text: str, *, last: bool) -> list[AnyPiece]:
        """What more text says; none of the pieces is empty, but for starts of calls.

        Args:
            last: no more follows.
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
        """The name of a call that begins: the model's own, or the next one of ours."""
        assert self._tools is not None, "who found the call"
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return start.call_id or self._tools.call_id(number)

    def _end_of_call(self, pieces: list[AnyPiece]) -> int:
        """A call that is open ends before what is thought next: how many pieces are still its."""
        if not self._in_call:
            return 0
        ends = (at for at, each in enumerate(pieces) if not isinstance(each, CallArguments))
        return next(ends, len(pieces))
