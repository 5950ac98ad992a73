from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tools.held_text import HeldText
from services.gateway.tools.reasoning import ReasoningParser
from services.gateway.tools.scanner import CallScanner

MARK = "</x>"
TEXT = st.lists(st.sampled_from(["a", " ", "\n", "<", "</", "/x>", MARK, "b c"]), max_size=12)


def read(pieces: list[str]) -> tuple[str, str | None]:
    held, shown = HeldText(MARK), ""
    for number, piece in enumerate(pieces):
        more, after = held.push(piece)
        shown += more
        if after is not None:
            return shown, after + "".join(pieces[number + 1 :])
    return shown + held.finish(), None


@given(TEXT)
def test_pieces_say_what_the_whole_says(pieces: list[str]) -> None:
    before, found, after = "".join(pieces).partition(MARK)
    assert read(pieces) == ((before.rstrip(), after) if found else (before, None))


def test_what_is_sure_is_shown_at_once() -> None:
    held = HeldText(MARK)
    shown = [held.push(piece)[0] for piece in ("a ", "\n", "b <", "/", "y", " ")]
    assert shown == ["a", "", " \nb", "", " </y", ""]
    assert held.finish() == " "


@pytest.mark.parametrize("space", [" ", "\n\t"])
def test_white_space_without_end_is_looked_at_once(
    space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0
    shown = HeldText._shown

    def counted(self: HeldText, text: str) -> str:
        nonlocal looked
        looked += len(text)
        return shown(self, text)

    monkeypatch.setattr(HeldText, "_shown", counted)
    parser = ReasoningParser("<x>", MARK, is_open=False)
    parser.push("<x>a")
    for _ in range(1000):
        assert parser.push(space).reasoning == ""
    assert looked == 1 + 1000 * len(space)
    assert parser.push("b").reasoning == space * 1000 + "b"


def test_white_space_before_any_thought_is_kept_for_an_answer() -> None:
    parser = ReasoningParser("<x>", MARK, is_open=False)
    assert [parser.push(" ") for _ in range(3)] == [parser.push("")] * 3
    assert parser.push("<y").answer == "   <y"


def test_white_space_in_arguments_is_passed_on_with_what_follows() -> None:
    scanner = CallScanner()
    pieces = [
        piece
        for text in ('{"name":"f","arguments": ', " ", '{"a":"', "  ", " ", 'b"', " ", "}", " }")
        for piece in scanner.push(text)[0]
    ]
    assert "".join(getattr(piece, "text", "") for piece in pieces) == '{"a":"   b" }'
    assert scanner.done
