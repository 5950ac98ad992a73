from __future__ import annotations

from typing import Any

import pytest

from kvmesh.core.types import FinishReason, Usage
from services.gateway.api.anthropic_api import MessagesBody
from services.gateway.api.anthropic_output import MessageObject
from services.gateway.api.single_answer import Generation
from services.gateway.tools.parsers import ToolFamily
from services.gateway.tools.pieces import PieceReader
from services.gateway.tools.tools import ToolMode, ToolReader, ToolUse

ASKED = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}


def blocks_of(arguments: str) -> list[dict[str, Any]]:
    tools = ToolReader(ToolUse(ToolMode.AUTO, ("f",), ToolFamily.OPENAI), "r")
    generation = Generation("r", "m", 0, PieceReader(None, tools))
    made = MessageObject(MessagesBody.model_validate(ASKED), generation)
    call = f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>"
    made.push(call, last=True)
    made.closing(FinishReason.STOP, Usage(1, 1, 0), "")
    content: list[dict[str, Any]] = made.whole()["content"]
    return content


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"a": [1]}', {"a": [1]}),
        ('{"a": [1', {}),
        ('{"a": "\\ud800"}', {}),
        *(('{"a":' * levels + "1" + "}" * levels, {}) for levels in (300, 2_000, 50_000)),
    ],
)
def test_arguments_that_cannot_be_read_are_an_empty_input(arguments: str, value: Any) -> None:
    (block,) = blocks_of(arguments)
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", value)
