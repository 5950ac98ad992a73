"""Clients over gRPC, as the SDK is one, keep what another gateway needs to go on with a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.client import AsyncClient, Client, Tool
from kvmesh.client.messages import GenerateOptions, request_message
from kvmesh.rpc.channels import open_channel
from kvmesh.v1 import inference_service_pb2 as pb
from kvmesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from tests.integration.gateway_fake_worker import MODEL
from tests.integration.gateway_stack import Stack
from tests.integration.test_gateway_api import CALL, HELLO, WEATHER
from tests.integration.test_gateway_resume import SAYS, stacks
from tests.redis_server import redis_process

TOOL = Tool("weather", "Tells the weather.", WEATHER["function"]["parameters"])


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Stack, Stack]]:
    with redis_process(tmp_path) as redis:
        async with stacks(tmp_path, redis) as both:
            yield both


@pytest.mark.parametrize(
    ("prompt", "says", "options"),
    [
        ("hi", SAYS, {"num_logprobs": 1, "num_prompt_logprobs": 1}),
        ("hi", SAYS, {"stop": ["tokens", " is lost or repeated: 🙂"], "seed": 5}),
        (HELLO, f"<think>well, {CALL}</think>So: {CALL} {CALL}", {"tools": [TOOL]}),
    ],
)
async def test_over_grpc_its_client_has_all_that_is_needed(
    two: tuple[Stack, Stack], prompt: Any, says: str, options: GenerateOptions
) -> None:
    one, other = two
    one.says(says)
    other.says(says)
    request = request_message(prompt, {**options, "request_id": "mine"}, MODEL)
    pieces = await _pieces(one, request)
    for count in range(1, len(pieces), 3):  # over HTTP, behind every event
        before = [token for piece in pieces[:count] for token in piece.token_ids]
        request.resume.CopyFrom(pieces[0].resume)
        request.resume.token_ids.extend(before)
        found = await _pieces(other, request)
        for each in (*found, *pieces):
            each.ClearField("placed")
        assert found[0].HasField("resume"), "so that it can go on once more"
        found[0].ClearField("resume")
        assert found == pieces[count:]


async def _pieces(stack: Stack, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with open_channel(f"127.0.0.1:{stack.context.port}") as channel:
        call = InferenceServiceStub(channel).Generate(request)
        return [piece async for piece in call]


async def test_what_cannot_be_a_clients_tokens(two: tuple[Stack, Stack]) -> None:
    one, other = two
    request = request_message("hi", {"max_tokens": 4, "seed": 5}, MODEL)
    (first, *_) = await _pieces(one, request)

    async def code(tokens: Sequence[int], **changes: int) -> str:
        point = pb.ResumePoint(seed=5, prompt_sum=first.resume.prompt_sum, token_ids=tokens)
        for name, value in changes.items():
            setattr(point, name, value)
        request.resume.CopyFrom(point)
        try:
            await _pieces(other, request)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "OK"

    assert await code(first.token_ids) == "OK"
    assert await code([7] * 3) == "OK", "they are the client's own"
    assert await code([7] * 4) == "FAILED_PRECONDITION"
    assert await code([7], prompt_sum=1) == "FAILED_PRECONDITION"
    assert await code([2**31]) == "INVALID_ARGUMENT"
    assert await code([7] * 100_000) == "INVALID_ARGUMENT"


async def _read(client: AsyncClient, stop: Callable[[], Awaitable[None]]) -> tuple[str, list[int]]:
    text, tokens = "", list[int]()
    async for delta in client.stream("hi", max_tokens=200):
        text += delta.text
        tokens += delta.token_ids
        if len(tokens) == 20:
            await stop()
    return text, tokens


def _read_blocking(client: Client, stop: Callable[[], None]) -> tuple[str, list[int]]:
    text, tokens = "", list[int]()
    for delta in client.stream("hi", max_tokens=200):
        text += delta.text
        tokens += delta.token_ids
        if len(tokens) == 20:
            stop()
    return text, tokens


@pytest.mark.parametrize("is_blocking", [False, True])
async def test_clients_go_on_by_themselves(two: tuple[Stack, Stack], is_blocking: bool) -> None:
    """At the address of the second gateway, when the first one has stopped."""
    one, other = two
    one.mesh.workers["d1"].does.stall_decode_after = 20
    targets = f"127.0.0.1:{one.context.port},127.0.0.1:{other.context.port}"
    loop = asyncio.get_running_loop()

    async def stop() -> None:
        await one.context.server.stop(None)

    if is_blocking:
        blocking = Client(targets)
        if blocking._calls.first:  # chance chose the other one
            blocking._gateways.leave(blocking._gateways.stub)

        def stop_there() -> None:
            asyncio.run_coroutine_threadsafe(stop(), loop).result()

        with blocking:
            text, tokens = await asyncio.to_thread(_read_blocking, blocking, stop_there)
    else:
        async with AsyncClient(targets) as client:
            if client._calls.first:
                client._gateways.leave(client._gateways.stub)
            text, tokens = await _read(client, stop)
    assert text == SAYS
    assert tokens == [*other.mesh.output, other.mesh.eos]
    (spec,) = other.mesh.workers["p1"].specs
    assert len(spec.token_ids) - spec.num_prompt_tokens in (20, 21), "none is made again"
