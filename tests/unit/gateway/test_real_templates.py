"""Calls that real chat templates write are read back, however their text is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.api.messages import Message
from services.gateway.text.tokenizer import ChatTemplate
from services.gateway.tools.parsers import ToolFamily, family_of_template, parser_for
from services.gateway.tools.reasoning import Thoughts, reasoning_of_template, thinking_after
from services.gateway.tools.scanner import CallStart, Content

FOLDER = Path(__file__).parent / "templates"

ARGUMENTS = {"city": 'Röm "x" {a} </b>', "days": 3, "more": {"a": [1, None, "}"]}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where"},
                    "days": {"type": "integer", "description": "how many"},
                    "more": {"type": "object", "description": "what else"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "time_now",
            "description": "Tells the time.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}

FAMILIES = {
    "deepseek-r1": ToolFamily.DEEPSEEK_V3,
    "deepseek-v3.1": ToolFamily.DEEPSEEK_V3,
    "gpt-oss": ToolFamily.OPENAI,
    "kimi-k2": ToolFamily.KIMI_K2,
    "ling-3": ToolFamily.GLM45,
    "minimax-m1": ToolFamily.MINIMAX,
    "mistral-nemo": ToolFamily.MISTRAL,
    "mistral-small-3.2": ToolFamily.MISTRAL,
    "qwen2.5": ToolFamily.HERMES,
    "qwen3": ToolFamily.HERMES,
    "qwen3-coder": ToolFamily.QWEN3_CODER,
    "qwen3.5": ToolFamily.QWEN3_CODER,
}
_TURN_ENDS = (
    *("<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "<end_of_sentence>", "<|call|>"),
    "<|role_end|>",
)


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call0000{number}", "type": "function", "function": function}


CALLS = [call(0, "weather", ARGUMENTS), call(1, "time_now", {})]


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], *, asks: bool) -> str:
    adapted = [Message.model_validate(message).for_template() for message in messages]
    return template.render(adapted, add_generation_prompt=asks, arguments={"tools": TOOLS})


def generated(template: ChatTemplate, calls: list[dict[str, Any]]) -> tuple[str, str]:
    """A prompt, and what the model would have written to make these calls."""
    question = {"role": "user", "content": "What?"}
    prompt = rendered(template, [question], asks=True)
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = rendered(template, [question, turn], asks=False).rstrip("\n")
    for end in _TURN_ENDS:
        whole = whole.removesuffix(end)
    if whole.startswith(prompt):
        return prompt, whole.removeprefix(prompt)
    # A past turn does not show the thinking that the prompt opens.
    before, opens, _ = prompt.rpartition("<think>")
    assert opens
    assert whole.startswith(before)
    return prompt, "hm\n</think>" + whole.removeprefix(before).removeprefix("</think>")


def read(template: ChatTemplate, prompt: str, pieces: list[str]) -> tuple[str, list[list[str]]]:
    """Text and calls, thinking left out."""
    family, reasoning = template.tool_family, template.reasoning_family
    assert family is not None
    thoughts = None if reasoning is None else Thoughts(thinking_after(reasoning, prompt[-60:]))
    parser = parser_for(family, SCHEMAS)
    content, calls = "", []
    for number, text in enumerate(pieces):
        is_last = number == len(pieces) - 1
        answer = text if thoughts is None else thoughts.told(0, text, last=is_last).answer
        for piece in [*parser.push(answer), *(parser.finish() if is_last else ())]:
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, CallStart):
                calls.append([piece.name, ""])
            else:
                calls[-1][1] += piece.text
    return content.strip(), calls


@pytest.fixture(params=sorted(FAMILIES))
def template(request: pytest.FixtureRequest) -> ChatTemplate:
    source = (FOLDER / f"{request.param}.jinja").read_text()
    family = family_of_template(source)
    assert family is FAMILIES[request.param]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, special, family, reasoning_of_template(source))


def test_calls_are_read_back(template: ChatTemplate) -> None:
    # Harmony ends a turn with its first call.
    calls = CALLS[:1] if template.tool_family is ToolFamily.OPENAI else CALLS
    prompt, text = generated(template, calls)
    expected = [
        (each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls
    ]
    for pieces in (
        [text],
        list(text),
        *([text[:cut], text[cut:]] for cut in range(1, len(text))),
    ):
        content, found = read(template, prompt, pieces)
        assert content == "", pieces
        assert [(name, json.loads(written)) for name, written in found] == expected, pieces


def test_what_a_call_gave_is_rendered(template: ChatTemplate) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": CALLS[:1]}
    result = {"role": "tool", "tool_call_id": CALLS[0]["id"], "name": "weather", "content": "sunny"}
    chat: list[dict[str, Any]] = [{"role": "user", "content": "What?"}, turn, result]
    prompt = rendered(template, chat, asks=True)
    assert "sunny" in prompt
    assert "Röm" in prompt, "the call itself is there too"


def test_thinking_of_a_past_turn_with_calls_is_rendered() -> None:
    source = (FOLDER / "gpt-oss.jinja").read_text()
    template = ChatTemplate(source, {}, ToolFamily.OPENAI, reasoning_of_template(source))
    turn = {"role": "assistant", "reasoning_content": "Let me see.", "tool_calls": CALLS[:1]}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "What?"},
        turn,
        {"role": "tool", "content": "sunny"},
    ]
    assert "<|channel|>analysis<|message|>Let me see.<|end|>" in rendered(template, chat, asks=True)


def test_every_template_here_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FAMILIES)
