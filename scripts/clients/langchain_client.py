"""LangChain's models and its agent."""

from __future__ import annotations

from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather


def _model(target: Target, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=target.model,
        base_url=target.url,
        api_key="any",
        max_retries=0,
        **{"max_tokens": 100, **more},
    )


def chat_whole_streamed_and_batched(target: Target) -> None:
    model = _model(target, max_tokens=12)
    assert model.invoke(QUESTION).usage_metadata["output_tokens"]
    assert "".join(each.text for each in model.stream(QUESTION))
    assert len(model.batch([QUESTION, "What is import?"])) == 2


def structured_output(target: Target) -> None:
    for method in ("json_schema", "function_calling"):
        model = _model(target).with_structured_output(Weather, method=method)
        assert model.invoke(QUESTION).city in CITIES


def responses(target: Target) -> None:
    model = _model(target, use_responses_api=True, max_tokens=12)
    assert model.invoke(QUESTION).text
    assert "".join(each.text for each in model.stream(QUESTION))


def completions(target: Target) -> None:
    model = OpenAI(model=target.model, base_url=target.url, api_key="any", max_tokens=8)
    assert model.invoke("os.path")
    assert "".join(model.stream("os.path"))


def an_agent_with_a_tool(target: Target) -> None:
    @tool
    def weather(city: Literal["Berlin", "Lisbon"]) -> str:
        """The weather of a city."""
        return f"{city}: sunny"

    @wrap_model_call
    def call_once(request: ModelRequest, handler: Any) -> Any:
        """A model this small calls nothing of itself."""
        called = any(isinstance(each, ToolMessage) for each in request.messages)
        return handler(request.override(tool_choice="none" if called else "required"))

    agent = create_agent(_model(target), [weather], middleware=[call_once])
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert any("sunny" in each.text for each in state["messages"] if isinstance(each, ToolMessage))
    assert state["messages"][-1].type == "ai"


if __name__ == "__main__":
    run_cases(
        [
            chat_whole_streamed_and_batched,
            structured_output,
            responses,
            completions,
            an_agent_with_a_tool,
        ]
    )
