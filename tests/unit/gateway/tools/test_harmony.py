from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tools.harmony import HarmonyCalls
from services.gateway.tools.reasoning import ReasoningFamily, Thinking, thinking_after
from services.gateway.tools.scanner import CallArguments, CallStart, Content
from services.gateway.tools.thinking_count import ThinkingCount

THINKING = Thinking(ReasoningFamily.OPENAI_GPTOSS, is_open=False)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"

CASES = [
    ("", "", ""),
    ("plain text", "", "plain text"),
    (f"{FINAL}Hello < you", "", "Hello < you"),
    (f"{ANALYSIS}Let me see.{NEXT}{FINAL}Hello", "Let me see.", "Hello"),
    (f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}{FINAL}Hello", "One.Two.", "Hello"),
    (f"{ANALYSIS}Let me s", "Let me s", ""),
    (f"{ANALYSIS}Let me see.<|end|><|start|>assis", "Let me see.", ""),
    (f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}Hello", "", "I look.Hello"),
    (
        f"{ANALYSIS}Hm.{NEXT}{CALL}{{}}",
        "Hm.",
        "<|channel|>commentary to=functions.weather<|message|>{}",
    ),
]


def cuts(text: str) -> list[list[str]]:
    """The text whole, letter by letter, and cut somewhere."""
    rng = random.Random(text)
    found = [[text], list(text)]
    for _ in range(20):
        first, second = sorted(rng.choices(range(len(text) + 1), k=2))
        found.append([text[:first], text[first:second], text[second:]])
    return found


@pytest.mark.parametrize(("text", "reasoning", "answer"), CASES)
def test_channels_are_told_apart(text: str, reasoning: str, answer: str) -> None:
    for pieces in cuts(text):
        reader = THINKING.parser()
        told = [*map(reader.push, pieces), reader.finish()]
        assert "".join(each.reasoning for each in told) == reasoning, pieces
        assert "".join(each.answer for each in told) == answer, pieces


def test_the_last_channel_goes_on_as_it_is() -> None:
    reader = THINKING.parser()
    reader.push(ANALYSIS)
    assert not reader.is_answer
    reader.push(f"hm{NEXT}{FINAL}")
    assert reader.is_answer
    assert reader.push("text").answer == "text"


def test_calls_after_thinking() -> None:
    text = (
        f'{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}{{"city": "Rome"}}'
    )
    for pieces in cuts(text):
        reader, calls = THINKING.parser(), HarmonyCalls()
        found = [each for piece in pieces for each in calls.push(reader.push(piece).answer)]
        found += calls.push(reader.finish().answer) + calls.finish()
        assert "".join(each.text for each in found if isinstance(each, Content)) == "I look."
        assert [each for each in found if isinstance(each, CallStart)] == [CallStart("weather")]
        arguments = [each.text for each in found if isinstance(each, CallArguments)]
        assert "".join(arguments) == '{"city": "Rome"}'


def test_the_recipient_may_come_before_the_channel() -> None:
    call = " to=functions.weather<|channel|>commentary json<|message|>{}<|call|>"
    for text in (call, f"{ANALYSIS}a{NEXT}{call}"):
        for pieces in cuts(text):
            reader = THINKING.parser()
            answer = "".join(reader.push(piece).answer for piece in pieces)
            assert answer == "<|channel|>commentary to=functions.weather<|message|>{}<|call|>"


def test_a_prompt_leaves_the_channel_to_the_model() -> None:
    assert thinking_after(THINKING.family, "<|end|><|start|>assistant") == THINKING
    count = ThinkingCount(THINKING, lambda token_id: bytes([token_id]))
    assert count.of(list(f"{ANALYSIS}ab<|end|>".encode())) == len(f"{ANALYSIS}ab<|end|>")


PARTS = [
    *("<|start|>", "assistant", "<|channel|>", "analysis", "commentary", "final", "<|message|>"),
    *(
        "<|end|>",
        "<|call|>",
        " to=functions.weather",
        "text",
        "<",
        " ",
        "\n",
        ANALYSIS,
        FINAL,
        CALL,
    ),
]


@settings(max_examples=40)
@given(st.lists(st.sampled_from(PARTS), max_size=12), st.lists(st.integers(0, 200), max_size=4))
def test_pieces_say_what_the_whole_says(parts: list[str], cuts_at: list[int]) -> None:
    text = "".join(parts)
    places = sorted(min(cut, len(text)) for cut in cuts_at)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    found = []
    for way in ([text], pieces, list(text)):
        reader, calls = THINKING.parser(), HarmonyCalls()
        told = [*map(reader.push, way), reader.finish()]
        said = [each for one in told for each in calls.push(one.answer)] + calls.finish()
        written = [(type(each).__name__, getattr(each, "text", "")) for each in said]
        found.append(
            (
                "".join(each.reasoning for each in told),
                "".join(each.answer for each in told),
                "".join(text for kind, text in written if kind == "CallArguments"),
                [kind for kind, _ in written].count("CallStart"),
            )
        )
    assert found[0] == found[1] == found[2]
