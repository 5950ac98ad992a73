"""Pydantic AI's agents."""

from __future__ import annotations

from typing import Literal

from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather

SHORT = ModelSettings(max_tokens=12)


def _chat(target: Target) -> Model:
    provider = OpenAIProvider(base_url=target.url, api_key="any")
    return OpenAIChatModel(target.model, provider=provider)


def _responses(target: Target) -> Model:
    provider = OpenAIProvider(base_url=target.url, api_key="any")
    return OpenAIResponsesModel(target.model, provider=provider)


def chat(target: Target) -> None:
    assert Agent(_chat(target), model_settings=SHORT).run_sync(QUESTION).output


async def chat_streamed(target: Target) -> None:
    async with Agent(_chat(target), model_settings=SHORT).run_stream(QUESTION) as run:
        assert "".join([piece async for piece in run.stream_text(delta=True)])


def responses(target: Target) -> None:
    assert Agent(_responses(target), model_settings=SHORT).run_sync(QUESTION).output


def structured_output_by_schema(target: Target) -> None:
    agent = Agent(_chat(target), output_type=NativeOutput(Weather))
    assert agent.run_sync(QUESTION).output.city in CITIES


def structured_output_by_a_tool(target: Target) -> None:
    for model in (_chat(target), _responses(target)):
        assert Agent(model, output_type=Weather).run_sync(QUESTION).output.city in CITIES


def an_agent_with_a_tool(target: Target) -> None:
    asked: list[str] = []

    def weather(city: Literal["Berlin", "Lisbon"]) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    # The schema allows calls of either: which one is drawn.
    agent = Agent(_chat(target), output_type=Weather, tools=[weather], retries=5)
    for seed in range(20):
        settings = ModelSettings(seed=seed, temperature=2.0)
        assert agent.run_sync(QUESTION, model_settings=settings).output.city in CITIES
        if asked:
            return
    raise AssertionError("the tool was never called")


if __name__ == "__main__":
    run_cases(
        [
            chat,
            chat_streamed,
            responses,
            structured_output_by_schema,
            structured_output_by_a_tool,
            an_agent_with_a_tool,
        ]
    )
