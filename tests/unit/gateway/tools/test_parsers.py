from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from kvmesh.core.errors import ConfigError
from services.gateway.tools.harmony import HarmonyCalls
from services.gateway.tools.json_forms import (
    HermesParser,
    LlamaParser,
    MistralParser,
    NamedParser,
    RequiredParser,
)
from services.gateway.tools.parsers import (
    ToolFamily,
    ToolParser,
    family_named,
    family_of_template,
    parser_for,
)
from services.gateway.tools.scanner import CallArguments, CallStart, Content
from services.gateway.tools.sections import SectionMarks, SectionParser
from services.gateway.tools.xml import QwenXmlParser

NAMES: Any = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "array"},
            "far": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        }
    },
    "time": {},
}


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
XML = (
    '<parameter=city>\nPa"r}is\n\n2\n</parameter>\n'
    '<parameter=days>\n[1, {"a": null}]\n</parameter>\n'
    "<parameter=far>\n None\n</parameter>\n</function>\n"
)
XML_START = "<tool_call><function=weather>"
XML_CALL = (
    "weather",
    '{"city": "Pa\\"r}is\\n\\n2", "days": [1, {"a": null}], "far": null}',
)
SECTION, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V31 = f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{WEATHER}<｜tool▁call▁end｜>"
V3 = V31.replace("weather<｜tool▁sep｜>", "function<｜tool▁sep｜>weather\n```json\n").replace(
    "<｜tool▁call▁end｜>", "\n```<｜tool▁call▁end｜>"
)
KIMI, KIMI_SEP = "<|tool_call_begin|>functions.weather", "<|tool_call_argument_begin|>"
KIMI_SECTION, KIMI_REST = "<|tool_calls_section_begin|>", f"{KIMI_SEP}{WEATHER}<|tool_call_end|>"
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Pa"r}is\n\n2</arg_value>'
    '<arg_key>days</arg_key>\n<arg_value>[1, {"a": null}]</arg_value>\n'
    "<arg_key>far</arg_key><arg_value>None</arg_value></tool_call>"
)

HARMONY = "<|channel|>commentary to=functions."

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
    (
        "hermes",
        f"<tool_call> no <tool_call>{OBJECT}</tool_call>",
        "<tool_call> no",
        [CALL],
    ),
    ("hermes", '<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": "\\ud800"}</tool_call>',
        "",
        [TIME],
    ),
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
    ("qwen3_coder", "text <tool", "text <tool", []),
    ("qwen3_coder", f"ok\n<tool_call>\n<function=weather>\n{XML}</tool_call>", "ok", [XML_CALL]),
    (
        "qwen3_coder",
        f"<tool_call>\n<function=time>\n</function>\n</tool_call>\n{XML_START}{XML}</tool_call>\nend",
        "end",
        [TIME, XML_CALL],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>\nRo",
        "",
        [("weather", '{"city": "Ro')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=other><parameter=n>1</parameter><parameter=m>\n\n</parameter></function>",
        "",
        [("other", '{"n": "1", "m": ""}')],
    ),
    ("deepseek_v3", "<｜tool▁calls", "<｜tool▁calls", []),
    ("deepseek_v3", f"So: {SECTION}{V31}{V31}{SECTION_END} b", "So:b", [CALL, CALL]),
    ("deepseek_v3", f"{SECTION}{V3}\n{V3}{SECTION_END}", "", [CALL, CALL]),
    (
        "deepseek_v3",
        f"{SECTION}<｜tool▁call▁begin｜>time<｜tool▁sep｜><｜tool▁call▁end｜>{V31}",
        "",
        [TIME, CALL],
    ),
    (
        "deepseek_v3",
        f"{SECTION}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{WEATHER}",
        "",
        [("function", WEATHER)],
    ),
    (
        "kimi_k2",
        f"Hm.{KIMI_SECTION}{KIMI}:0{KIMI_REST}{KIMI}:1{KIMI_REST}<|tool_calls_section_end|>",
        "Hm.",
        [CALL, CALL],
    ),
    ("glm45", f"Hm.\n{GLM}\n<tool_call>time\n</tool_call> end", "Hm.end", [XML_CALL, TIME]),
    ("glm45", "<tool_call>time</tool_call><tool_call></tool_call>", "", [TIME]),
    ("glm45", "a <tool", "a <tool", []),
    ("glm45", f"{GLM[:58]}", "", [("weather", '{"city": "Pa\\"r')]),
    ("minimax", f"a\n<tool_calls>\n{OBJECT}\n{OBJECT}\n</tool_calls>\nb", "ab", [CALL, CALL]),
    ("minimax", "<tool_calls>\n</tool_calls>", "", []),
    ("minimax", '<tool_calls>{"a": 1', '{"a": 1', []),
    ("openai", "just text", "just text", []),
    ("openai", f"ok{HARMONY}weather<|message|>{WEATHER}<|call|>", "ok", [CALL]),
    ("openai", f"{HARMONY}weather<|message|>{WEATHER}", "", [CALL]),
    ("openai", f"{HARMONY}time<|message|> <|call|>{HARMONY}time<|message|>", "", [TIME, TIME]),
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
        (QwenXmlParser(NAMES), '<tool_call><function=weather><parameter=city>Pa"r'),
        (SectionParser(SectionMarks.DEEPSEEK), SECTION + V3[:-60]),
        (HarmonyCalls(), f"{HARMONY}weather<|message|>{WEATHER[:9]}"),
        (HermesParser(), "<tool_call>" + OBJECT[:40]),
        (LlamaParser(NAMES), PARAMETERS[:40]),
        (MistralParser(), "[TOOL_CALLS][" + OBJECT[:40]),
    ],
)
def test_arguments_are_passed_on_before_the_call_is_complete(
    parser: ToolParser, start: str
) -> None:
    name, *arguments = parser.push(start)
    assert name == CallStart("weather")
    assert arguments
    written = "".join(each.text for each in arguments if isinstance(each, CallArguments))
    assert WEATHER.startswith(written)
    assert json.loads(WEATHER)["days"] == [1, {"a": None}]


def test_kimi_names_its_calls_itself() -> None:
    parser = parser_for(ToolFamily.KIMI_K2, NAMES)
    text = f"<|tool_calls_section_begin|>{KIMI}:3{KIMI_SEP}{{}}<|tool_call_end|>"
    assert parser.push(text)[0] == CallStart("weather", "functions.weather:3")


@pytest.mark.parametrize("family", list(ToolFamily))
def test_thousands_of_calls_that_say_nothing_are_read(family: ToolFamily) -> None:
    for text in ("<tool_call></tool_call>", "[TOOL_CALLS][]", "<tool_calls></tool_calls>", "{}"):
        parser = parser_for(family, NAMES)
        parser.push(text * 3000)
        parser.finish()


@pytest.mark.parametrize("size", [100, 10**6])
def test_arguments_as_long_as_a_file(size: int) -> None:
    arguments = json.dumps({"city": "x" * 400_000})
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    begin = time.process_time()  # of this process: others may be busy
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(HermesParser(), pieces) == ("", [("weather", arguments)])
    # A tenth of this; twenty seconds if each character copies what came before.
    assert time.process_time() - begin < 6


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", '"1"'),
        ({"type": ["string"]}, "null", '"null"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "so", '"so"'),
        ({"type": "integer"}, "1", "1"),
        ({"type": "integer"}, "one", '"one"'),
        ({"type": "boolean"}, "True", "true"),
        ({"enum": ["a", "1"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"$ref": "#/x"}, '{"a": [1]}', '{"a": [1]}'),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "object"}, '{"a": -Infinity}', json.dumps('{"a": -Infinity}')),
        ({"type": ["string", "null"]}, '"\\ud800"', json.dumps('"\\ud800"')),
        ({"type": "array"}, "[" * 100_000, json.dumps("[" * 100_000)),
        ({}, "1", '"1"'),
        (None, "1", '"1"'),
        ("odd", "1", '"1"'),
    ],
)
def test_values_without_quotes_are_what_the_schema_says(schema: Any, text: str, value: str) -> None:
    parser = QwenXmlParser({"f": {"properties": {"x": schema}}})
    written = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
    assert read(parser, [written]) == ("", [("f", f'{{"x": {value}}}')])


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>{% endif %}", ToolFamily.HERMES),
        ("{{ '[TOOL_CALLS]' }}", ToolFamily.MISTRAL),
        ('{"name": function name, "parameters": dictionary of …}', ToolFamily.LLAMA3_JSON),
        ("{% if builtin_tools %}<|python_tag|>{% endif %}", ToolFamily.LLAMA3_JSON),
        ("{% for tool in tools %}{{ tool.parameters }}{% endfor %}", None),
        ("<tool_call>\\n<function=name>", ToolFamily.QWEN3_CODER),
        ("<tool_call>name\\n<arg_key>", ToolFamily.GLM45),
        ("<other:tool_call><function=name>", None),
        ("{{ '<｜tool▁calls▁begin｜>' }}", ToolFamily.DEEPSEEK_V3),
        ("{{ '<|tool_calls_section_begin|>' }}", ToolFamily.KIMI_K2),
        ("within <tool_calls></tool_calls> tags", ToolFamily.MINIMAX),
        ("<|channel|>commentary <|constrain|>json", ToolFamily.OPENAI),
    ],
)
def test_the_family_is_read_from_the_template(source: str, family: ToolFamily | None) -> None:
    assert family_of_template(source) is family


def test_a_config_may_name_the_family() -> None:
    hermes = "<tool_call>"
    assert family_named("auto", hermes) is ToolFamily.HERMES
    assert family_named("mistral", hermes) is ToolFamily.MISTRAL
    assert family_named("none", hermes) is None
    with pytest.raises(ConfigError, match="auto, hermes, llama3_json, mistral, qwen3_coder"):
        family_named("pythonic", hermes)
