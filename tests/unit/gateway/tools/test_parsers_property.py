"""Whatever a model writes, its parser takes it, and pieces say what the whole says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tools.parsers import ToolFamily, parser_for
from tests.unit.gateway.tools.test_parsers import NAMES, read

MARKS = {
    ToolFamily.HERMES: ["<tool_call>", "</tool_call>"],
    ToolFamily.LLAMA3_JSON: ["<|python_tag|>", "; "],
    ToolFamily.MISTRAL: ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[", "]", ", "],
    ToolFamily.QWEN3_CODER: [
        *("<tool_call>", "</tool_call>", "<function=weather>", "</function>"),
        *("<parameter=city>", "<parameter=days>", "</parameter>"),
    ],
    ToolFamily.DEEPSEEK_V3: [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "function", "```json\n", "\n```"),
    ],
    ToolFamily.KIMI_K2: [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_end|>", "<|tool_call_argument_begin|>", "functions.weather:0"),
    ],
    ToolFamily.GLM45: [
        *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>"),
        "</arg_value>",
    ],
    ToolFamily.MINIMAX: ["<tool_calls>", "</tool_calls>"],
    ToolFamily.OPENAI: ["<|channel|>commentary to=functions.", "<|message|>", "<|call|>"],
}
WORDS = [
    *(
        '{"name": "weather", "arguments": {"city": "a}"}}',
        '{"name": "weather"',
        "{",
        "}",
        '"',
        "{}",
    ),
    *("\\", "weather", "city", "\n", " ", "<", '{"name": "\\ud800", "arguments": "\\udfff"}'),
    '{"name": "weather", "parameters": ' + "[" * 20,
]


@pytest.mark.parametrize("family", list(ToolFamily), ids=lambda family: family.value)
@settings(max_examples=15)
@given(data=st.data())
def test_pieces_say_what_the_whole_says(family: ToolFamily, data: st.DataObject) -> None:
    words = st.sampled_from([*MARKS[family], *MARKS[family], *WORDS])
    text = "".join(data.draw(st.lists(words, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = read(parser_for(family, NAMES), [text])
    assert read(parser_for(family, NAMES), pieces) == (content, calls)
    assert read(parser_for(family, NAMES), list(text)) == (content, calls)
    "".join([content, *(name + arguments for name, arguments in calls)]).encode()  # it is text
