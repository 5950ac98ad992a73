from __future__ import annotations

from typing import Any

from kvmesh.core.types import FinishReason, Usage
from services.gateway.api.responses_api import ResponsesBody
from services.gateway.api.responses_output import ResponseObject
from services.gateway.api.single_answer import Generation
from services.gateway.tools.harmony import ANALYSIS
from services.gateway.tools.parsers import ToolFamily
from services.gateway.tools.pieces import PieceReader
from services.gateway.tools.reasoning import ReasoningFamily, Thinking, Thoughts
from services.gateway.tools.tools import ToolMode, ToolReader, ToolUse

NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
TEXT = f"{ANALYSIS}one<|end|>{NEXT}{CALL}{NEXT}{ANALYSIS}two<|end|>{NEXT}{CALL}"


def output(pieces: list[str]) -> list[dict[str, Any]]:
    thoughts = Thoughts(Thinking(ReasoningFamily.OPENAI_GPTOSS, is_open=False))
    tools = ToolReader(ToolUse(ToolMode.AUTO, ("f",), ToolFamily.OPENAI), "r")
    generation = Generation("r", "m", 0, PieceReader(thoughts, tools))
    made = ResponseObject(ResponsesBody.model_validate({"input": "a"}), generation)
    for piece in pieces:
        made.push(piece, last=False)
    made.push("", last=True)
    made.closing(FinishReason.STOP, Usage(1, 1, 0), "")
    items: list[dict[str, Any]] = made.whole()["output"]
    return items


def test_what_is_thought_between_calls_takes_no_arguments_from_them_however_it_is_cut() -> None:
    for first in range(1, len(TEXT)):
        for second in range(first + 1, len(TEXT), 29):
            items = output([TEXT[:first], TEXT[first:second], TEXT[second:]])
            calls = [each for each in items if each["type"] == "function_call"]
            assert [(each["name"], each["arguments"]) for each in calls] == [("f", '{"a": 1}')] * 2
            thoughts = [each for each in items if each["type"] == "reasoning"]
            told = "".join(part["text"] for each in thoughts for part in each["content"])
            assert told == "onetwo"
