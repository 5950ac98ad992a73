from __future__ import annotations

import pytest

from services.gateway.tools.parsers import ToolFamily
from services.gateway.tools.pieces import AnyPiece, PieceReader, Thought
from services.gateway.tools.reasoning import ReasoningFamily, Thinking, Thoughts
from services.gateway.tools.scanner import CallArguments, CallStart, Content
from services.gateway.tools.tools import ToolMode, ToolReader, ToolUse

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT = f"<think>hm</think>Look: {CALL}{CALL}"


def reader() -> PieceReader:
    thoughts = Thoughts(Thinking(ReasoningFamily.QWEN3, is_open=False))
    return PieceReader(thoughts, ToolReader(ToolUse(ToolMode.AUTO, ("f",), ToolFamily.HERMES), "r"))


def joined(pieces: list[AnyPiece]) -> list[tuple[str, str]]:
    """Pieces by kind, with neighbours of one kind as one."""
    found: list[tuple[str, str]] = []
    for piece in pieces:
        kind = type(piece).__name__
        text = piece.name if isinstance(piece, CallStart) else piece.text
        if found and found[-1][0] == kind and kind != "CallStart":
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 200])
def test_thinking_text_and_calls_come_in_order_however_the_text_is_cut(size: int) -> None:
    one = reader()
    pieces: list[AnyPiece] = []
    for start in range(0, len(TEXT), size):
        pieces += one.read(TEXT[start : start + size], last=start + size >= len(TEXT))
    call = [(CallStart.__name__, "f"), (CallArguments.__name__, '{"a": 1}')]
    assert joined(pieces) == [(Thought.__name__, "hm"), (Content.__name__, "Look:"), *call, *call]
    assert all(isinstance(each, CallStart) or each.text for each in pieces)


def test_calls_have_names_of_their_own_or_ours() -> None:
    one = reader()
    names = [one.call_id(CallStart("f", given)) for given in ("", "x", "")]
    assert names[1] == "x"
    assert len({*names}) == 3


def test_plain_text_is_content() -> None:
    assert PieceReader(None, None).read("a", last=False) == [Content("a")]
    assert PieceReader(None, None).read("", last=True) == []
