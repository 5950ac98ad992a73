"""LiteLLM's providers for servers like this one."""

from __future__ import annotations

import json
from collections.abc import Callable

import litellm

from scripts.clients.cases import CITIES, QUESTION, WEATHER_TOOL, Target, run_cases

MESSAGES = [{"role": "user", "content": QUESTION}]


def _chat(provider: str) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        given = {"api_base": target.url, "api_key": "any", "max_tokens": 12}
        whole = litellm.completion(f"{provider}/{target.model}", MESSAGES, **given)
        assert whole.usage.completion_tokens
        chunks = litellm.completion(f"{provider}/{target.model}", MESSAGES, stream=True, **given)
        assert "".join(each.choices[0].delta.content or "" for each in chunks)

    run.__name__ = f"chat_by_{provider}"
    return run


def completions(target: Target) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{target.model}",
        prompt="os.path",
        api_base=target.url,
        api_key="any",
        max_tokens=8,
    )
    assert answer.choices[0].text


def tools(target: Target) -> None:
    answer = litellm.completion(
        f"hosted_vllm/{target.model}",
        MESSAGES,
        tools=[WEATHER_TOOL],
        tool_choice="required",
        api_base=target.url,
        api_key="any",
    )
    call, *_ = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES


def responses(target: Target) -> None:
    answer = litellm.responses(
        model=f"openai/{target.model}",
        input=QUESTION,
        max_output_tokens=12,
        api_base=target.url,
        api_key="any",
    )
    assert answer.output[0].content[0].text


def a_wrong_model(target: Target) -> None:
    try:
        litellm.completion("openai/nobody", MESSAGES, api_base=target.url, api_key="any")
    except litellm.NotFoundError:
        return
    raise AssertionError("a wrong model was taken")


if __name__ == "__main__":
    run_cases([_chat("openai"), _chat("hosted_vllm"), completions, tools, responses, a_wrong_model])
