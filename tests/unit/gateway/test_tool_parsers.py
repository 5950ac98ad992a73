from __future__ import annotations

import json
import random

import pytest

from kvmesh.core.errors import ConfigError
from services.gateway.tool_parsers import (
    HermesParser,
    LlamaParser,
    MistralParser,
    NamedParser,
    RequiredParser,
    ToolFamily,
    ToolParser,
    family_named,
    family_of_template,
    parser_for,
)
from services.gateway.tool_scanner import CallArguments, CallStart, Content

NAMES = {"weather", "time"}


def make(kind: str) -> ToolParser:
    if kind == "required":
        return RequiredParser()
    if kind == "named":
        return NamedParser("weather")
    return parser_for(ToolFamily(kind), NAMES)


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    content = ""
    calls: list[tuple[str, str]] = []
    found = [piece for text in pieces for piece in parser.push(text)] + parser.finish()
    for piece in found:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + piece.text)
    return content, calls


WEATHER = '{"city": "Pa\\"r}is", "days": [1, {"a": null}]}'
CALL = ("weather", WEATHER)
TIME = ("time", "{}")
OBJECT = f'{{"name": "weather", "arguments": {WEATHER}}}'
PARAMETERS = f'{{"name": "weather", "parameters": {WEATHER}}}'

CASES = [
    ("hermes", "just text, a < b", "just text, a < b", []),
    ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", "", [CALL]),
    ("hermes", f"Let me see.\n<tool_call>{OBJECT}</tool_call>", "Let me see.", [CALL]),
    (
        "hermes",
        f'<tool_call>{OBJECT}</tool_call>\n<tool_call>{{"name": "time"}}</tool_call>',
        "",
        [CALL, TIME],
    ),
    ("hermes", f"<tool_call>{OBJECT}</tool_call> done", "done", [CALL]),
    ("hermes", f"<tool_call>{OBJECT}", "", [CALL]),
    ("hermes", f'<tool_call>{{"arguments": {WEATHER}, "name": "weather"}}</tool_call>', "", [CALL]),
    ("hermes", "<tool_call>no object</tool_call>", "<tool_call>no object</tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}', []),
    ("hermes", '<tool_call>{"x": 1', '<tool_call>{"x": 1', []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"ci', "", [("weather", '{"ci')]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", [TIME]),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("time", '{"a": 1}')],
    ),
    ("hermes", "ends in <tool", "ends in <tool", []),
    ("llama3_json", "text {", "text {", []),
    ("llama3_json", f"\n{PARAMETERS}", "", [CALL]),
    ("llama3_json", f"<|python_tag|>{PARAMETERS}", "", [CALL]),
    ("llama3_json", f'{PARAMETERS}; {{"name": "time", "parameters": {{}}}}', "", [CALL, TIME]),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", '{"answer": 3} and more', '{"answer": 3} and more', []),
    ("llama3_json", '{"answer": 3', '{"answer": 3', []),
    ("llama3_json", "<|python", "<|python", []),
    ("llama3_json", "", "", []),
    ("mistral", "text [1]", "text [1]", []),
    ("mistral", f"[TOOL_CALLS][{OBJECT}]", "", [CALL]),
    (
        "mistral",
        f'[TOOL_CALLS] [{OBJECT}, {{"name": "time", "arguments": {{}}}}]',
        "",
        [CALL, TIME],
    ),
    ("mistral", f"ok [TOOL_CALLS]weather{WEATHER}", "ok", [CALL]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]time[ARGS]{{}}", "", [CALL, TIME]),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{WEATHER}", "", [CALL]),
    ("mistral", "[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
    ("required", f'[{PARAMETERS}, {{"name": "time", "parameters": {{}}}}]', "", [CALL, TIME]),
    ("named", WEATHER, "", [CALL]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    kind: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert read(make(kind), [text]) == (content, calls)
    assert read(make(kind), list(text)) == (content, calls)
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(make(kind), parts) == (content, calls), parts


@pytest.mark.parametrize(
    ("parser", "start"),
    [
        (HermesParser(), "<tool_call>" + OBJECT[:40]),
        (LlamaParser(NAMES), PARAMETERS[:40]),
        (MistralParser(), "[TOOL_CALLS][" + OBJECT[:40]),
    ],
)
def test_arguments_are_passed_on_before_the_call_is_complete(
    parser: ToolParser, start: str
) -> None:
    name, arguments = parser.push(start)
    assert name == CallStart("weather")
    assert isinstance(arguments, CallArguments)
    assert WEATHER.startswith(arguments.text)
    assert json.loads(WEATHER)["days"] == [1, {"a": None}]


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", ToolFamily.HERMES),
        ("{{ '[TOOL_CALLS]' }}", ToolFamily.MISTRAL),
        ('{"name": function name, "parameters": dictionary of …}', ToolFamily.LLAMA3_JSON),
        ("{% if builtin_tools %}<|python_tag|>{% endif %}", ToolFamily.LLAMA3_JSON),
        ("{% for tool in tools %}{{ tool.parameters }}{% endfor %}", None),
    ],
)
def test_the_family_is_read_from_the_template(source: str, family: ToolFamily | None) -> None:
    assert family_of_template(source) is family


def test_a_config_may_name_the_family() -> None:
    hermes = "<tool_call>"
    assert family_named("auto", hermes) is ToolFamily.HERMES
    assert family_named("mistral", hermes) is ToolFamily.MISTRAL
    assert family_named("none", hermes) is None
    with pytest.raises(ConfigError, match="auto, hermes, llama3_json, mistral, none"):
        family_named("pythonic", hermes)
