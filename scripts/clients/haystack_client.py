"""Haystack's generators and its agent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather


@tool
def weather(city: Annotated[Literal["Berlin", "Lisbon"], "the city"]) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


def _generator(target: Target, **more: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token("any"), model=target.model, api_base_url=target.url, **more
    )


def chat(target: Target) -> None:
    given = {"max_completion_tokens": 12}
    generator = _generator(target, generation_kwargs=given)
    assert generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text


def chat_streamed(target: Target) -> None:
    seen: list[StreamingChunk] = []
    generator = _generator(
        target, streaming_callback=seen.append, generation_kwargs={"max_completion_tokens": 12}
    )
    answer = generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text
    assert answer == "".join(each.content for each in seen)


def structured_output(target: Target) -> None:
    generator = _generator(target, generation_kwargs={"response_format": Weather})
    text = generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text
    assert Weather.model_validate_json(text).city in CITIES


def a_tool_and_its_result(target: Target) -> None:
    question = ChatMessage.from_user(QUESTION)
    required = {"tool_choice": "required"}
    call = _generator(target, tools=[weather], generation_kwargs=required).run([question])
    (reply,) = call["replies"]
    told = [
        ChatMessage.from_tool(weather.invoke(**each.arguments), origin=each)
        for each in reply.tool_calls
    ]
    assert "sunny" in told[0].tool_call_result.result
    after = _generator(target, tools=[weather], generation_kwargs={"max_completion_tokens": 12})
    assert after.run([question, reply, *told])["replies"]


if __name__ == "__main__":
    run_cases([chat, chat_streamed, structured_output, a_tool_and_its_result])
