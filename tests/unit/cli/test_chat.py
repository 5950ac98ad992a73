"""What Ctrl-C does to an answer, without a server."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from kvmesh.cli.chat import Chat
from kvmesh.cli.chat_api import Answer, ChatApi, Conversation, Piece


class Interrupted(ChatApi):
    """Says its pieces; after each round of them somebody presses Ctrl-C."""

    def __init__(self, *pieces: Piece) -> None:
        self.pieces = pieces

    async def stream(
        self, model: str, conversation: Conversation, answer: Answer
    ) -> AsyncGenerator[Piece, None]:
        for piece in self.pieces:
            answer.text += piece.text
            answer.thinking += piece.thinking
            yield piece
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60.0)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with asyncio.Runner() as runner:
        yield runner
    signal.signal(signal.SIGINT, before)


def chat(*pieces: Piece, **options: Any) -> Chat:
    return Chat(Interrupted(*pieces), "m", Conversation(), **options)


@pytest.mark.parametrize(
    ("pieces", "cut"),
    [
        ((), "no word of the answer has come yet"),
        ((Piece("hmm", ""),), "no word of the answer has come yet; it had thought 3 characters"),
        ((Piece("hmm", ""), Piece("", "It jo")), "the answer is cut off after 5 characters"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_only_answer_says_what_was_cut_and_stops_the_command(
    pieces: tuple[Piece, ...],
    cut: str,
    as_json: bool,
    runner: asyncio.Runner,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt):
        chat(*pieces, as_json=as_json, goes_on=False).run(["q", "not asked"], runner)
    out, err = capsys.readouterr()
    assert err == f"kvmesh chat: {cut}\n"
    text = "".join(piece.text for piece in pieces)
    if as_json:
        answer = json.loads(out)
        assert (answer["content"], answer["finish_reason"]) == (text, "stopped")
    else:
        assert out == text + "\n"


def test_of_a_conversation_it_stops_the_answer_alone(
    runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not chat(Piece("", "It jo"), as_json=False).run(["one", "two"], runner)
    out, err = capsys.readouterr()
    assert (out, err) == ("It jo [stopped]\n" * 2, "")
