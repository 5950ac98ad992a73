"""OpenAI's agents, over chat and over responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather

KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def weather(city: Literal["Berlin", "Lisbon"]) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


def _model(kind: str, target: Target) -> OpenAIChatCompletionsModel | OpenAIResponsesModel:
    client = openai.AsyncOpenAI(base_url=target.url, api_key="any", max_retries=0)
    return KINDS[kind](model=target.model, openai_client=client)


def _settings(**more: object) -> ModelSettings:
    return ModelSettings(max_tokens=500, temperature=0.0, store=False, **more)


def _text(kind: str) -> Callable[[Target], object]:
    async def run(target: Target) -> None:
        agent = Agent("a", model=_model(kind, target), model_settings=_settings())
        assert (await Runner.run(agent, QUESTION)).final_output
        streamed = Runner.run_streamed(agent, QUESTION)
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output

    run.__name__ = f"text_by_{kind}"
    return run


def _structured(kind: str) -> Callable[[Target], object]:
    async def run(target: Target) -> None:
        model = _model(kind, target)
        agent = Agent("a", model=model, model_settings=_settings(), output_type=Weather)
        assert (await Runner.run(agent, QUESTION)).final_output.city in CITIES

    run.__name__ = f"structured_output_by_{kind}"
    return run


def _tool(kind: str) -> Callable[[Target], object]:
    async def run(target: Target) -> None:
        # Required for the first turn only, as agents do by default.
        settings = _settings(tool_choice="required")
        # Its end is a schema: free text of a model this small may not end.
        model = _model(kind, target)
        agent = Agent(
            "a", model=model, model_settings=settings, tools=[weather], output_type=Weather
        )
        result = await Runner.run(agent, QUESTION)
        outputs = [each for each in result.new_items if each.type == "tool_call_output_item"]
        assert any("sunny" in each.output for each in outputs)

    run.__name__ = f"a_tool_by_{kind}"
    return run


if __name__ == "__main__":
    set_tracing_disabled(True)
    run_cases([make(kind) for make in (_text, _structured, _tool) for kind in KINDS])
