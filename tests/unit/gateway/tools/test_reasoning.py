from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.errors import ConfigError
from services.gateway.tools.reasoning import (
    ReasoningFamily,
    Thinking,
    reasoning_named,
    reasoning_of_template,
    thinking_after,
)
from services.gateway.tools.told import Told

QWEN3, R1, MISTRAL = ReasoningFamily.QWEN3, ReasoningFamily.DEEPSEEK_R1, ReasoningFamily.MISTRAL

CASES = {
    "the model opens": (QWEN3, False, "<think>\nhm, <b>\n</think>\n\nyes", Told("hm, <b>", "yes")),
    "the prompt opened": (QWEN3, True, "hm\n</think>\n\nyes", Told("hm", "yes")),
    "the prompt opened and the model repeats": (R1, True, "<think>\nhm</think>y", Told("hm", "y")),
    "nobody opened": (QWEN3, False, "  yes <think>no</think>", Told("", "  yes <think>no</think>")),
    "nothing was thought": (QWEN3, False, "<think>\n\n</think>\n\nyes", Told("", "yes")),
    "cut while thinking": (QWEN3, True, "hm, hm", Told("hm, hm", "")),
    "cut in a mark": (QWEN3, True, "hm </thi", Told("hm </thi", "")),
    "cut before anything": (QWEN3, False, "<thi", Told("", "<thi")),
    "marks of Mistral": (MISTRAL, False, "[THINK]hm[/THINK]yes", Told("hm", "yes")),
    "spaces within stay": (QWEN3, True, "a  b\n\nc </think>  d  e\n", Told("a  b\n\nc", "d  e\n")),
    "white space alone": (QWEN3, False, " \n", Told("", " \n")),
}


def read(family: ReasoningFamily, text: str, cuts: list[int], *, is_open: bool) -> Told:
    parser = Thinking(family, is_open).parser()
    edges = [0, *sorted(cuts), len(text)]
    told = [parser.push(text[a:b]) for a, b in itertools.pairwise(edges)]
    told.append(parser.finish())
    return Told("".join(each.reasoning for each in told), "".join(each.answer for each in told))


@pytest.mark.parametrize("name", CASES)
def test_thinking_and_answer_are_told_apart_wherever_the_text_is_cut(name: str) -> None:
    family, is_open, text, expected = CASES[name]
    assert read(family, text, [], is_open=is_open) == expected
    for cut in range(len(text)):
        assert read(family, text, [cut], is_open=is_open) == expected, cut
    assert read(family, text, list(range(len(text))), is_open=is_open) == expected


WORDS = st.lists(
    st.sampled_from([*"a\n <", "<think>", "</think>", "<th", "ink>", "</"]), max_size=9
)


@given(WORDS, st.lists(st.integers(0, 40), max_size=5), st.booleans())
@settings(max_examples=60)
def test_pieces_say_what_the_whole_says(words: list[str], cuts: list[int], is_open: bool) -> None:
    text = "".join(words)
    cuts = [min(cut, len(text)) for cut in cuts]
    whole = read(QWEN3, text, [], is_open=is_open)
    assert read(QWEN3, text, cuts, is_open=is_open) == whole
    if not is_open and not text.lstrip().startswith("<think>"):
        assert whole == Told("", text)


def test_a_stream_is_told_without_delay() -> None:
    parser = Thinking(QWEN3, is_open=False).parser()
    told = [
        parser.push(each) for each in ("<think>", "\n", "one", " two", " <", "/think>", "\n", "x")
    ]
    assert told == [
        *[Told("", "")] * 2,
        *[Told("one", ""), Told(" two", "")],
        *[Told("", "")] * 3,
        Told("", "x"),
    ]


@pytest.mark.parametrize(
    ("family", "tail", "is_open"),
    [
        (QWEN3, "<|im_start|>assistant\n", False),
        (QWEN3, "<|im_start|>assistant\n<think>\n", True),
        (QWEN3, "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        (R1, "<｜Assistant｜>", True),
        (R1, "<｜Assistant｜><think>\n", True),
        (R1, "<｜Assistant｜></think>", False),
        (R1, "sun<｜tool▁output▁end｜>", False),
        (R1, "sun<｜tool▁output▁end｜><｜tool▁outputs▁end｜>", False),
        (MISTRAL, "[/INST]", False),
    ],
)
def test_the_prompt_says_where_the_answer_begins(
    family: ReasoningFamily, tail: str, is_open: bool
) -> None:
    assert thinking_after(family, tail) == Thinking(family, is_open)


def test_the_template_says_which_family_it_is() -> None:
    assert reasoning_of_template("{% if '</think>' in content %}<|im_start|>") is QWEN3
    assert reasoning_of_template("{{'<｜Assistant｜>'}}{{content.split('</think>')}}") is R1
    assert reasoning_of_template("[THINK]{{ x }}[/THINK]") is MISTRAL
    assert reasoning_of_template("<|im_start|>") is None
    assert reasoning_named("auto", "</think>") is QWEN3
    assert reasoning_named("none", "</think>") is None
    assert reasoning_named("deepseek_r1", "") is R1
    with pytest.raises(ConfigError, match="auto, qwen3, deepseek_r1, mistral, openai_gptoss, none"):
        reasoning_named("granite", "")
