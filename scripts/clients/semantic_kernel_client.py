"""Semantic Kernel's chat and text."""

from __future__ import annotations

from typing import Annotated, Literal

import openai
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather


def _client(target: Target) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=target.url, api_key="any", max_retries=0)


def _chat(target: Target) -> OpenAIChatCompletion:
    return OpenAIChatCompletion(ai_model_id=target.model, async_client=_client(target))


def _history() -> ChatHistory:
    history = ChatHistory()
    history.add_user_message(QUESTION)
    return history


async def chat(target: Target) -> None:
    settings = OpenAIChatPromptExecutionSettings(max_tokens=12)
    service = _chat(target)
    assert str(await service.get_chat_message_content(_history(), settings))
    pieces = service.get_streaming_chat_message_content(_history(), settings)
    assert "".join([str(each) async for each in pieces])


async def completions(target: Target) -> None:
    service = OpenAITextCompletion(ai_model_id=target.model, async_client=_client(target))
    settings = OpenAITextPromptExecutionSettings(max_tokens=8)
    assert str(await service.get_text_content("os.path", settings))


async def structured_output(target: Target) -> None:
    settings = OpenAIChatPromptExecutionSettings(max_tokens=100, response_format=Weather)
    text = str(await _chat(target).get_chat_message_content(_history(), settings))
    assert Weather.model_validate_json(text).city in CITIES


async def a_function_that_is_called(target: Target) -> None:
    class Sky:
        asked = 0

        @kernel_function(description="The weather of a city")
        def weather(self, city: Annotated[Literal["Berlin", "Lisbon"], "the city"]) -> str:
            self.asked += 1
            return f"{city}: sunny"

    kernel, sky = Kernel(), Sky()
    kernel.add_plugin(sky, "sky")
    settings = OpenAIChatPromptExecutionSettings(
        max_tokens=100,
        function_choice_behavior=FunctionChoiceBehavior.Required(),
    )
    await _chat(target).get_chat_message_content(_history(), settings, kernel=kernel)
    assert sky.asked


if __name__ == "__main__":
    run_cases([chat, completions, structured_output, a_function_that_is_called])
