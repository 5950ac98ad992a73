"""The official client, new or as old as 1.30.1."""

from __future__ import annotations

import json

import openai

from scripts.clients.cases import CITIES, QUESTION, WEATHER_TOOL, Target, run_cases

MESSAGES = [{"role": "user", "content": QUESTION}]
IS_NEW = int(openai.__version__.split(".")[0]) > 1
FORCED = {"type": "function", "function": {"name": "weather"}}


def _client(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=target.url, api_key="any", max_retries=0)


def models(target: Target) -> None:
    client = _client(target)
    assert [each.id for each in client.models.list()] == [target.model]
    assert client.models.retrieve(target.model).id == target.model


def chat(target: Target) -> None:
    answer = _client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_tokens=12, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12


def chat_streamed(target: Target) -> None:
    chunks = list(
        _client(target).chat.completions.create(
            model=target.model,
            messages=MESSAGES,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[-1].usage.completion_tokens == 12
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1])


def chat_with_log_probabilities(target: Target) -> None:
    answer = _client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, n=2
    )
    for choice in answer.choices:
        assert all(len(each.top_logprobs) == 3 for each in choice.logprobs.content)


def tools(target: Target) -> None:
    client = _client(target)
    answer = client.chat.completions.create(
        model=target.model, messages=MESSAGES, tools=[WEATHER_TOOL], tool_choice="required"
    )
    message = answer.choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in CITIES
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    after = client.chat.completions.create(
        model=target.model,
        messages=[*MESSAGES, message, result],
        tools=[WEATHER_TOOL],
        max_tokens=12,
    )
    assert after.choices[0].message.role == "assistant"


def tools_streamed(target: Target) -> None:
    stream = _client(target).chat.completions.create(
        model=target.model, messages=MESSAGES, tools=[WEATHER_TOOL], tool_choice=FORCED, stream=True
    )
    pieces = [
        call.function.arguments or ""
        for chunk in stream
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    assert json.loads("".join(pieces))["city"] in CITIES


def completions(target: Target) -> None:
    client = _client(target)
    answer = client.completions.create(model=target.model, prompt=["os.path", "import"])
    assert len(answer.choices) == 2
    chunks = client.completions.create(
        model=target.model, prompt="os.path", max_tokens=8, stream=True
    )
    assert "".join(each.choices[0].text for each in chunks)


def echo_with_log_probabilities(target: Target) -> None:
    answer = _client(target).completions.create(
        model=target.model, prompt="import os", max_tokens=1, echo=True, logprobs=1
    )
    told = answer.choices[0].logprobs
    assert told.token_logprobs[0] is None
    assert all(each <= 0 for each in told.token_logprobs[1:])
    assert "".join(told.tokens) == answer.choices[0].text


def errors(target: Target) -> None:
    client = _client(target)
    refused: list[tuple[type[Exception], str | None, str | None]] = []
    for wrong in ({"model": "nobody"}, {"temperature": -1}):
        try:
            client.chat.completions.create(**{"model": target.model, "messages": MESSAGES, **wrong})
        except openai.APIStatusError as error:
            refused.append((type(error), error.code, error.param))
    (no_model, no_value) = refused
    assert no_model == (openai.NotFoundError, "model_not_found", "model")
    assert no_value[0] is openai.BadRequestError
    assert no_value[2] == "temperature"


async def many_at_once_without_waiting(target: Target) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=target.url, api_key="any") as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=target.model,
                    messages=[{"role": "user", "content": f"{index} {QUESTION}"}],
                    max_tokens=8,
                )
                for index in range(16)
            )
        )
    assert all(each.usage.completion_tokens for each in answers)


def parsed_into_a_model_of_pydantic(target: Target) -> None:
    from scripts.clients.weather import Weather

    answer = _client(target).chat.completions.parse(
        model=target.model, messages=MESSAGES, response_format=Weather, max_tokens=100
    )
    assert answer.choices[0].message.parsed.city in CITIES


def responses(target: Target) -> None:
    client = _client(target)
    answer = client.responses.create(
        model=target.model, input=QUESTION, max_output_tokens=12, store=False
    )
    assert answer.output_text
    with client.responses.stream(
        model=target.model, input=QUESTION, max_output_tokens=12, store=False
    ) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


def responses_with_tools(target: Target) -> None:
    tool = {"type": "function", "strict": True, **WEATHER_TOOL["function"]}
    answer = _client(target).responses.create(
        model=target.model, input=QUESTION, tools=[tool], tool_choice="required", store=False
    )
    call, *_ = [each for each in answer.output if each.type == "function_call"]
    assert json.loads(call.arguments)["city"] in CITIES


OLD = [
    models,
    chat,
    chat_streamed,
    chat_with_log_probabilities,
    tools,
    tools_streamed,
    completions,
    echo_with_log_probabilities,
    errors,
    many_at_once_without_waiting,
]
NEW = [parsed_into_a_model_of_pydantic, responses, responses_with_tools]

if __name__ == "__main__":
    run_cases([*OLD, *NEW] if IS_NEW else OLD)
