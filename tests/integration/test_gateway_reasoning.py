"""Thinking apart from the answer, over HTTP with the official client, on a fake mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.config import ModelConfig
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.integration.test_gateway_api import ARGUMENTS, CALL, HELLO, WEATHER
from tests.unit.gateway.tiny_model import CHAT_TEMPLATE, TOOL_TEMPLATE

TEMPLATE = TOOL_TEMPLATE + (
    "{% if thinks %}<think>\n{% elif thinks is false %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path, template=TEMPLATE) as stack:
        yield stack
        await stack.idle()


async def ask(stack: Stack, **fields: Any) -> dict[str, Any]:
    """The only choice of an answer."""
    body = {"model": MODEL, "messages": HELLO, **fields}
    async with (
        aiohttp.ClientSession(stack.url, raise_for_status=True) as session,
        session.post("/v1/chat/completions", json=body) as answer,
    ):
        (choice,) = (await answer.json())["choices"]
        found: dict[str, Any] = choice
        return found


async def message(stack: Stack, **fields: Any) -> tuple[str | None, str | None]:
    """Thinking and answer."""
    found = (await ask(stack, **fields))["message"]
    return found.get("reasoning_content"), found["content"]


async def test_thinking_is_a_field_of_its_own(stack: Stack) -> None:
    stack.says("<think>\nlet me see\n</think>\n\nyes")
    assert await message(stack) == ("let me see", "yes")
    stack.says("yes")
    assert await message(stack) == (None, "yes")
    found = (await ask(stack))["message"]
    assert found["reasoning_content"] is found["reasoning"] is None, "clients know either name"


async def test_the_prompt_may_open_or_close_it(stack: Stack) -> None:
    stack.says("let me see</think>yes")
    assert await message(stack, chat_template_kwargs={"thinks": True}) == ("let me see", "yes")
    closed = await message(stack, chat_template_kwargs={"thinks": False})
    assert closed == (None, "let me see</think>yes")


async def test_an_answer_that_was_cut_while_thinking(stack: Stack) -> None:
    stack.says("let me see what")
    found = await ask(stack, chat_template_kwargs={"thinks": True}, max_tokens=2)
    assert found["finish_reason"] == "length"
    assert found["message"]["content"] == ""
    assert found["message"]["reasoning_content"].startswith("le")


async def test_a_stream_tells_it_token_by_token(stack: Stack) -> None:
    tokens = stack.says("<think>\nlet me see <b>\n</think>\n\nyes, sir")
    assert len(stack.tokenizer.encode("</think>").ids) > 1, "the mark is split over tokens"
    stream = await stack.client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, n=2, max_tokens=len(tokens)
    )
    thought, content = {0: "", 1: ""}, {0: "", 1: ""}
    num_pieces = 0
    async for chunk in stream:
        (choice,) = chunk.choices
        extra = choice.delta.model_extra or {}
        more = extra.get("reasoning_content", "")
        assert extra.get("reasoning", "") == more
        assert not (content[choice.index] and more), "no thought comes after the answer began"
        thought[choice.index] += more
        content[choice.index] += choice.delta.content or ""
        num_pieces += bool(more)
    assert thought == {0: "let me see <b>", 1: "let me see <b>"}
    assert content == {0: "yes, sir", 1: "yes, sir"}
    assert num_pieces > 4


async def test_a_tool_call_after_thinking(stack: Stack) -> None:
    stack.says(f"<think>{CALL}</think>Look: {CALL}")
    found = await ask(stack, tools=[WEATHER])
    assert found["finish_reason"] == "tool_calls"
    assert found["message"]["reasoning_content"] == CALL  # thought of, not made
    assert found["message"]["content"] == "Look:"
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS


async def test_who_does_not_want_it_gets_the_answer_alone(stack: Stack) -> None:
    stack.says("<think>hm</think>yes")
    found = (await ask(stack, include_reasoning=False))["message"]
    assert found["content"] == "yes"
    assert "reasoning_content" not in found


async def test_a_structure_leaves_no_room_for_it(stack: Stack) -> None:
    stack.says('{"a": 1}')
    found = (await ask(stack, response_format={"type": "json_object"}))["message"]
    assert found["content"] == '{"a": 1}'
    assert "reasoning_content" not in found


async def test_it_can_be_turned_off(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = ModelConfig(path=str(folder), served_name=MODEL, reasoning_parser="none")
    async with gateway_stack(folder, template=TEMPLATE, model=model) as stack:
        stack.says("<think>hm</think>yes")
        found = (await ask(stack))["message"]
        assert found["content"] == "<think>hm</think>yes"
        assert "reasoning_content" not in found
        await stack.idle()


def says_apart(stack: Stack, *parts: str) -> None:
    """As `says`, but no token goes over two parts: the tiny model's own end is a mark here."""
    stack.mesh.output = [token for part in parts for token in stack.tokenizer.encode(part).ids]


async def test_channels_of_gpt_oss(tmp_path: Path) -> None:
    harmony = CHAT_TEMPLATE + "{# <|channel|>analysis <|channel|>commentary #}"
    async with gateway_stack(tmp_path, template=harmony) as stack:
        thought = ("<|channel|>analysis<|message|>hm<|", "end|><|start|>assistant")
        says_apart(stack, *thought, "<|channel|>final<|message|>yes")
        assert await message(stack) == ("hm", "yes")
        asks = f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}"
        says_apart(stack, *thought, asks)
        stream = await stack.client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[WEATHER], stream=True
        )
        name, arguments, reasons = "", "", set()
        async for chunk in stream:
            (choice,) = chunk.choices
            assert not choice.delta.content
            reasons.add(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        assert (name, arguments, reasons) == ("weather", ARGUMENTS, {None, "tool_calls"})
        tool: Any = {"type": "function", "strict": None, **WEATHER["function"]}
        answer = await stack.client.responses.create(model=MODEL, input="a", tools=[tool])
        assert [item.type for item in answer.output] == ["reasoning", "function_call"]
        await stack.idle()
