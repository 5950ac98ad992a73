"""Agents of smolagents."""

from __future__ import annotations

import json

from smolagents import ChatMessage, OpenAIModel, Tool, ToolCallingAgent

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases

MESSAGES = [ChatMessage(role="user", content=[{"type": "text", "text": QUESTION}])]


class WeatherTool(Tool):
    """A tool with a choice, so that a model this small can only be right."""

    name = "weather"
    description = "The weather of a city"
    inputs = {"city": {"type": "string", "description": "the city", "enum": CITIES}}  # noqa: RUF012 its base class declares it so
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"{city}: sunny"


def _model(target: Target) -> OpenAIModel:
    return OpenAIModel(target.model, api_base=target.url, api_key="any", max_tokens=200)


def chat(target: Target) -> None:
    model = _model(target)
    assert model.generate(MESSAGES).content
    assert "".join(each.content or "" for each in model.generate_stream(MESSAGES))


def tools(target: Target) -> None:
    answer = _model(target).generate(MESSAGES, tools_to_call_from=[WeatherTool()])
    arguments = answer.tool_calls[0].function.arguments
    city = (json.loads(arguments) if isinstance(arguments, str) else arguments)["city"]
    assert city in CITIES


def an_agent_of_a_few_steps(target: Target) -> None:
    agent = ToolCallingAgent([WeatherTool()], _model(target), max_steps=3, verbosity_level=0)
    agent.run(QUESTION)
    failed = [step.error for step in agent.memory.steps if getattr(step, "error", None)]
    assert not [error for error in failed if "generation" in type(error).__name__.lower()]


if __name__ == "__main__":
    run_cases([chat, tools, an_agent_of_a_few_steps])
