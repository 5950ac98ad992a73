"""LlamaIndex for servers like OpenAI's.

It reads the types of a tool's arguments, so they are not put off to text here.
"""

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from scripts.clients.cases import CITIES, QUESTION, Target, run_cases
from scripts.clients.weather import Weather


def _model(target: Target, **more: Any) -> OpenAILike:
    return OpenAILike(
        model=target.model,
        api_base=target.url,
        api_key="any",
        context_window=8192,
        max_tokens=100,
        max_retries=0,
        **{"is_chat_model": True, "is_function_calling_model": True, **more},
    )


def chat(target: Target) -> None:
    model = _model(target)
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(messages).message.content
    assert "".join(each.delta or "" for each in model.stream_chat(messages))


def completions(target: Target) -> None:
    model = _model(target, is_chat_model=False)
    assert model.complete("os.path").text
    assert "".join(each.delta or "" for each in model.stream_complete("os.path"))


def tools(target: Target) -> None:
    def weather(city: Literal["Berlin", "Lisbon"]) -> str:
        """The weather of a city."""
        return f"{city}: sunny"

    answer = _model(target).predict_and_call(
        [FunctionTool.from_defaults(weather)], QUESTION, tool_required=True
    )
    assert "sunny" in str(answer)


def structured_output(target: Target) -> None:
    for more in ({}, {"should_use_structured_outputs": True}):
        model = _model(target, **more).as_structured_llm(Weather)
        assert model.complete(QUESTION).raw.city in CITIES


if __name__ == "__main__":
    run_cases([chat, completions, tools, structured_output])
