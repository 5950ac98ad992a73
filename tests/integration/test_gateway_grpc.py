"""The gateway's gRPC API in front of a fake mesh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvmesh.client import AsyncClient, Message, Tool
from kvmesh.core.types import RefusalReason
from kvmesh.rpc.channels import open_channel
from kvmesh.v1.inference_service_pb2 import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    TokenPrompt,
)
from kvmesh.v1.inference_service_pb2 import Tool as ToolMessage
from kvmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from kvmesh.v1.types_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    PLACEMENT_MODE_AGGREGATED,
    STRUCTURE_KIND_REGEX,
    LogitBias,
    SamplingParams,
    Structure,
    TokenSequence,
)
from services.gateway.config import AccessConfig
from services.gateway.fronts import grpc_front
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack, gateway_stack
from tests.integration.test_gateway_api import ARGUMENTS, CALL, WEATHER
from tests.integration.test_gateway_reasoning import TEMPLATE as THINKING
from tests.integration.test_gateway_responses import TEMPLATE as RESPONSES

if TYPE_CHECKING:  # the stub files know it, the generated modules do not
    from kvmesh.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

ASKS = [ChatMessage(role="user", content="hello")]


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with gateway_stack(tmp_path) as stack:
        yield stack


@pytest.fixture
async def stub(stack: Stack) -> AsyncIterator[InferenceServiceAsyncStub]:
    async with open_channel(f"127.0.0.1:{stack.context.port}") as channel:
        yield InferenceServiceStub(channel)


async def collect(
    stub: InferenceServiceAsyncStub, request: GenerateRequest
) -> list[GenerateResponse]:
    return [response async for response in stub.Generate(request)]


def trailers(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    return dict(error.trailing_metadata())


async def test_generate_chat(stack: Stack, stub: InferenceServiceAsyncStub) -> None:
    chat = ChatPrompt(messages=[ChatMessage(role="user", content="hello")])
    responses = await collect(stub, GenerateRequest(chat=chat, request_id="mine"))
    assert "".join(response.text for response in responses) == "one request, one handoff"
    assert {response.request_id for response in responses} == {"mine"}
    last = responses[-1]
    assert last.finish_reason == FINISH_REASON_STOP
    assert last.usage.completion_tokens == len(stack.mesh.output) + 1
    assert last.usage.cached_tokens == 3
    await stack.idle()


async def test_thinking_of_a_chat_is_told_apart(tmp_path: Path) -> None:
    async with gateway_stack(tmp_path, template=THINKING) as stack:
        tokens = stack.says("<think>\nlet me see\n</think>\n\nyes")
        async with AsyncClient(f"127.0.0.1:{stack.context.port}") as client:
            chat = [{"role": "user", "content": "hello"}]
            deltas = [delta async for delta in client.stream(chat)]
            assert "".join(delta.text for delta in deltas) == "yes"
            assert sum(bool(delta.reasoning) for delta in deltas) > 3
            usage = deltas[-1].usage
            assert usage is not None
            assert len(tokens) - 4 <= usage.reasoning_tokens < usage.completion_tokens
            whole = await client.generate(chat)
            assert (whole.reasoning, whole.text) == ("let me see", "yes")
            assert whole.usage.reasoning_tokens == usage.reasoning_tokens
            short = await client.generate(chat, include_reasoning=False)
            assert (short.reasoning, short.text) == ("", "yes")
            raw = await client.generate("hello")
            assert raw.reasoning == ""
            assert raw.text.startswith("<think>"), "a text prompt goes on as raw text"
        await stack.idle()


async def test_tools_of_a_chat(tmp_path: Path) -> None:
    tool = Tool("weather", parameters=WEATHER["function"]["parameters"])
    async with gateway_stack(tmp_path, template=RESPONSES) as stack:
        stack.says(f"<think>hm</think>Look: {CALL} {CALL}")
        async with AsyncClient(f"127.0.0.1:{stack.context.port}") as client:
            question = {"role": "user", "content": "hello"}
            deltas = [delta async for delta in client.stream([question], tools=[tool])]
            assert sum(len(delta.tool_calls) for delta in deltas) > 4, "arguments as they come"
            whole = await client.generate([question], tools=[tool])
            assert (whole.reasoning, whole.text) == ("hm", "Look:")
            first, second = whole.tool_calls
            assert first.name == second.name == "weather"
            assert first.arguments == second.arguments == ARGUMENTS
            assert first.id != second.id
            (only,) = (
                await client.generate([question], tools=[tool], parallel_tool_calls=False)
            ).tool_calls
            assert only.arguments == ARGUMENTS
            turn = Message(
                role="assistant", content="", reasoning="hm", tool_calls=whole.tool_calls
            )
            result = Message(role="tool", content="sun", tool_call_id=first.id)
            await client.generate(
                [Message(role="user", content="hello"), turn, result],
                template_arguments={"reasoning_effort": "low"},
            )
            prompt = stack.tokenizer.decode(
                stack.mesh.workers["p1"].specs[-1].token_ids, skip_special_tokens=False
            )
            assert f'<call {first.id} weather {{"city": "Rome"}}>' in prompt
            assert f"<of {first.id} " in prompt
            assert prompt.endswith("<effort low>")
            stack.says(ARGUMENTS)
            named = await client.generate([question], tools=[tool], tool_choice="weather")
            assert [call.arguments for call in named.tool_calls] == [ARGUMENTS]
        await stack.idle()


async def test_generate_tokens_with_sampling(stack: Stack, stub: InferenceServiceAsyncStub) -> None:
    request = GenerateRequest(
        model=MODEL,
        tokens=TokenPrompt(token_ids=[5, 6]),
        sampling=SamplingParams(max_tokens=4, seed=9, num_logprobs=1),
        stop=["never said"],
        placement=PLACEMENT_MODE_AGGREGATED,
    )
    responses = await collect(stub, request)
    token_ids = [token for response in responses for token in response.token_ids]
    assert token_ids == stack.mesh.output[:4]
    logprobs = [entry.logprob for response in responses for entry in response.logprobs]
    assert logprobs == [-token / 8 for token in token_ids]
    assert responses[-1].finish_reason == FINISH_REASON_LENGTH
    (spec,) = stack.mesh.workers["p1"].specs
    assert (spec.sampling.temperature, spec.sampling.seed) == (0.0, 9)
    assert (spec.sampling.top_p, spec.sampling.repetition_penalty) == (1.0, 1.0)


async def test_structure_scores_and_place(stack: Stack, stub: InferenceServiceAsyncStub) -> None:
    sampling = SamplingParams(
        max_tokens=2,
        num_logprobs=-1,
        num_prompt_logprobs=0,
        bad_words=[TokenSequence(token_ids=[5, 6])],
        logit_bias=[LogitBias(token_id=3, bias=-1.0)],
        structure=Structure(kind=STRUCTURE_KIND_REGEX, text="[a-z ,]+"),
    )
    request = GenerateRequest(tokens=TokenPrompt(token_ids=[5, 6, 7]), sampling=sampling)
    first, *rest = await collect(stub, request)
    assert [entry.logprob for entry in first.prompt_logprobs] == [-6 / 8, -7 / 8]
    assert not any(response.prompt_logprobs for response in rest)
    assert (first.placed.prefill_worker, first.placed.decode_worker) == ("p1", "d1")
    (spec,) = stack.mesh.workers["p1"].specs
    assert spec.sampling.bad_words == ((5, 6),)
    assert spec.sampling.logit_bias == ((3, -1.0),)
    assert spec.sampling.structure is not None
    await stack.idle()


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerateRequest(), "prompt"),
        (GenerateRequest(text="a", sampling=SamplingParams(temperature=3)), "sampling.temperature"),
        (GenerateRequest(text="a", stop=[""]), "stop"),
        (
            GenerateRequest(
                text="a",
                sampling=SamplingParams(
                    structure=Structure(kind=STRUCTURE_KIND_REGEX, text="[a-z")
                ),
            ),
            "sampling.structure",
        ),
        (
            GenerateRequest(text="a", sampling=SamplingParams(structure=Structure(text="a"))),
            "sampling",
        ),
        (
            GenerateRequest(
                text="a",
                sampling=SamplingParams(logit_bias=[LogitBias(token_id=3, bias=float("nan"))]),
            ),
            "sampling.logit_bias",
        ),
        (
            GenerateRequest(text="a", sampling=SamplingParams(bad_words=[TokenSequence()])),
            "sampling.bad_words",
        ),
        (GenerateRequest(text="a", sampling=SamplingParams(max_tokens=999)), "sampling.max_tokens"),
    ],
)
async def test_invalid(
    stub: InferenceServiceAsyncStub, request_: GenerateRequest, param: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailers(caught.value)["kvmesh-param"] == param


async def test_more_tokens_than_fit_are_refused_before_they_are_read(
    stub: InferenceServiceAsyncStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    monkeypatch.setattr(grpc_front, "call_from_proto", lambda *call: read.append(call))
    tokens = TokenPrompt(token_ids=[5] * 100_000)
    with pytest.raises(grpc.aio.AioRpcError, match="the prompt has 100000 tokens") as caught:
        await collect(stub, GenerateRequest(tokens=tokens))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailers(caught.value)["kvmesh-param"] == "tokens"
    assert read == []


BAD_CHATS: list[tuple[ChatPrompt, str]] = [
    (ChatPrompt(), "chat.messages"),
    (ChatPrompt(messages=[ChatMessage()]), "chat.messages[0].role"),
    (ChatPrompt(messages=ASKS, chosen_tool="x"), "chat.tool_choice"),
    (ChatPrompt(messages=ASKS, template_arguments_json="[]"), "chat.template_arguments_json"),
    (
        ChatPrompt(messages=ASKS, tools=[ToolMessage(name="f", parameters_json="{")]),
        "chat.tools[0].parameters_json",
    ),
]


async def test_invalid_chats(stub: InferenceServiceAsyncStub) -> None:
    for chat, param in BAD_CHATS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, GenerateRequest(chat=chat))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailers(caught.value)["kvmesh-param"] == param


async def test_unknown_model(stub: InferenceServiceAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, GenerateRequest(model="other", text="a"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_refusal_has_who_and_when(stack: Stack, stub: InferenceServiceAsyncStub) -> None:
    worker = stack.mesh.workers["d1"]
    worker.does.refuse_reserves, worker.does.reserve_reason = -1, RefusalReason.NO_BLOCKS
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(stub, GenerateRequest(text="a", ttft_deadline_ms=300))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    found = trailers(caught.value)
    assert (found["kvmesh-refusal"], found["retry-after-ms"]) == ("decode-no_blocks", "1500")
    await stack.idle()


async def test_cancel_reaches_workers(stack: Stack, stub: InferenceServiceAsyncStub) -> None:
    stack.mesh.go.clear()
    call = stub.Generate(GenerateRequest(text="a"))
    worker = stack.mesh.workers["d1"]
    await stack.mesh.until(lambda: len(worker.running) == 1)
    call.cancel()
    await stack.idle()
    assert worker.cancels == worker.reserves
    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def test_models_and_keys(tmp_path: Path) -> None:
    async with (
        gateway_stack(tmp_path, access=AccessConfig(api_keys="key")) as stack,
        open_channel(f"127.0.0.1:{stack.context.port}") as channel,
    ):
        stub = InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub, GenerateRequest(text="a"))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(ListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer key"),)
        models = await stub.ListModels(ListModelsRequest(), metadata=metadata)
        assert [(model.name, model.max_model_len) for model in models.models] == [(MODEL, 512)]
        call = stub.Generate(GenerateRequest(text="a"), metadata=metadata)
        responses = [response async for response in call]
        assert responses[-1].finish_reason == FINISH_REASON_STOP
