from __future__ import annotations

import pytest

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.messages import Message
from services.gateway.api.responses_input import PastFunctionCall
from services.gateway.text.tokenizer import ChatTemplate

TEXT = '{"city":  "Röm", "days": [1, null]}'
OBJECT = '{"city": "Röm", "days": [1, null]}'


def rendered(source: str, arguments: str) -> str:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    return ChatTemplate(
        "{%- set args = messages[0].tool_calls[0].function.arguments -%}" + source, {}
    ).render([message.for_template()])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a ' + args + ' b' }}", f"a {TEXT} b"),  # DeepSeek
        ("{{ 'a ' + (args | tojson) }}", f"a {OBJECT}"),  # MiniMax
        ("{{ args if args is string else args | tojson }}", OBJECT),  # Qwen, Kimi
        (
            "{%- for name, value in args | items %}{{ name }}={{ value }};{% endfor %}",
            "city=Röm;days=[1, None];",
        ),  # Qwen3-Coder
        ("{{ args ~ '' }} {{ args }}", f"{TEXT} {TEXT}"),
        ("{{ args.city }}", "Röm"),
    ],
)
def test_past_arguments_suit_every_template(source: str, text: str) -> None:
    assert rendered(source, TEXT) == text


def test_past_thinking_has_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        message = Message.model_validate({"role": "assistant", "content": "a", name: "hm"})
        assert message.for_template()["reasoning_content"] == "hm"


@pytest.mark.parametrize("arguments", ["{", '{"a": "\\ud800"}', '{"a":' * 5000])
def test_past_arguments_are_json(arguments: str) -> None:
    assert rendered("{{ args }}", "") == "{}"
    with pytest.raises(InvalidRequestError, match="arguments of f are not JSON"):
        rendered("{{ args }}", arguments)
    with pytest.raises(ValueError, match="arguments"):
        PastFunctionCall.model_validate(
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
        )
