"""Both clients against one servicer; every test runs for each of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, closing
from typing import Any, Protocol

import grpc
import pytest

from kvmesh.client import (
    NO_RETRY,
    AsyncClient,
    Client,
    Delta,
    Generation,
    Model,
    Prompt,
    RetryPolicy,
)
from kvmesh.core.errors import (
    AuthenticationError,
    DeadlineError,
    InvalidRequestError,
    LostError,
    ModelNotFoundError,
    ProtocolError,
    RefusedError,
)
from kvmesh.core.types import FinishReason, RefusalReason, Usage
from kvmesh.v1 import inference_service_pb2 as pb
from kvmesh.v1 import types_pb2
from kvmesh.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

Code = grpc.StatusCode
FAST = RetryPolicy(attempts=3, initial_s=0.001, max_s=0.001)
Failure = tuple[grpc.StatusCode, str, dict[str, str]]


class ScriptedServicer(InferenceServiceServicer):
    """Fails as told, then echoes the tokens of the prompt, one message per token."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.fail_after_first: Failure | None = None
        self.stall_after_first = False
        self.omit_end = False
        self.requests: list[pb.GenerateRequest] = []
        self.keys: list[str] = []
        self.metadata: list[dict[str, str]] = []
        self.cancelled = asyncio.Event()

    async def _fail(self, context: Any, failure: Failure) -> None:
        code, details, trailing = failure
        await context.abort(code, details, tuple(trailing.items()))

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.keys.append(self.metadata[-1].get("authorization", ""))
        if self.failures:
            await self._fail(context, self.failures.pop(0))
        for token in request.tokens.token_ids:
            try:  # a client may leave while its message is still being sent
                yield pb.GenerateResponse(request_id="r1", text=f"<{token}>", token_ids=[token])
                if self.stall_after_first:
                    await asyncio.Event().wait()
            except (asyncio.CancelledError, GeneratorExit):
                self.cancelled.set()
                raise
            if self.fail_after_first:
                await self._fail(context, self.fail_after_first)
        if not self.omit_end:
            count = len(request.tokens.token_ids)
            yield pb.GenerateResponse(
                request_id="r1",
                finish_reason=types_pb2.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=count, completion_tokens=count, cached_tokens=1),
            )

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        if self.failures:
            await self._fail(context, self.failures.pop(0))
        return pb.ListModelsResponse(models=[pb.Model(name="m", max_model_len=99)])


class Caller(Protocol):
    """What both clients can do, for tests."""

    async def generate(self, prompt: Prompt, **options: Any) -> Generation: ...

    async def first(self, prompt: Prompt, **options: Any) -> Delta:
        """Takes one piece and leaves the stream."""
        ...

    async def models(self) -> list[Model]: ...

    async def close(self) -> None: ...


class AsyncCaller:
    def __init__(self, target: str, **options: Any) -> None:
        self.client = AsyncClient(target, **options)
        self.generate = self.client.generate
        self.models = self.client.list_models
        self.close = self.client.close

    async def first(self, prompt: Prompt, **options: Any) -> Delta:
        async with aclosing(self.client.stream(prompt, **options)) as deltas:
            async for delta in deltas:
                return delta
        raise AssertionError("no piece came")


class ThreadCaller:
    def __init__(self, target: str, **options: Any) -> None:
        self.client = Client(target, **options)

    async def generate(self, prompt: Prompt, **options: Any) -> Generation:
        return await asyncio.to_thread(self.client.generate, prompt, **options)

    async def first(self, prompt: Prompt, **options: Any) -> Delta:
        def take() -> Delta:
            with closing(self.client.stream(prompt, **options)) as deltas:
                return next(deltas)

        return await asyncio.to_thread(take)

    async def models(self) -> list[Model]:
        return await asyncio.to_thread(self.client.list_models)

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


MakeCaller = Callable[..., Caller]


@pytest.fixture
async def servicer() -> ScriptedServicer:
    return ScriptedServicer()


@pytest.fixture
async def target(servicer: ScriptedServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)


@pytest.fixture(params=[AsyncCaller, ThreadCaller])
async def make(request: pytest.FixtureRequest, target: str) -> AsyncIterator[MakeCaller]:
    closers: list[Callable[[], Awaitable[None]]] = []

    def build(**options: Any) -> Caller:
        caller: Caller = request.param(target, **{"retry": FAST, **options})
        closers.append(caller.close)
        return caller

    yield build
    for close in closers:
        await close()
        await close()  # closing is repeatable


async def test_generate(make: MakeCaller, servicer: ScriptedServicer) -> None:
    caller = make(api_key="secret", default_model="m")
    generation = await caller.generate([5, 6], max_tokens=2, stop="x", timeout_s=20)
    assert generation.text == "<5><6>"
    assert generation.token_ids == (5, 6)
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.usage == Usage(2, 2, 1)
    assert generation.request_id == "r1"
    [sent] = servicer.requests
    assert (sent.model, sent.sampling.max_tokens, list(sent.stop)) == ("m", 2, ["x"])
    assert servicer.keys == ["Bearer secret"]


async def test_metadata_of_the_client_and_of_the_call(
    make: MakeCaller, servicer: ScriptedServicer
) -> None:
    caller = make(api_key="secret", metadata={"x-team": "a"})
    await caller.generate([1], metadata={"x-call": "b"})
    await caller.generate([1])
    first, second = servicer.metadata
    assert (first["x-team"], first["x-call"], first["authorization"]) == ("a", "b", "Bearer secret")
    assert (second["x-team"], second.get("x-call")) == ("a", None)


async def test_list_models(make: MakeCaller, servicer: ScriptedServicer) -> None:
    servicer.failures = [(Code.UNAVAILABLE, "starting", {"kvmesh-refusal": "draining"})]
    assert await make().models() == [Model("m", 99)]


async def test_a_refusal_before_the_first_token_is_tried_again(
    make: MakeCaller, servicer: ScriptedServicer
) -> None:
    servicer.failures = [
        (Code.UNAVAILABLE, "busy", {"kvmesh-refusal": "busy", "retry-after-ms": "1"}),
        (Code.UNAVAILABLE, "lost", {"kvmesh-refusal": "lost"}),
    ]
    assert (await make().generate([1])).token_ids == (1,)
    assert len(servicer.requests) == 3


async def test_a_refusal_arrives_when_attempts_are_used_up(
    make: MakeCaller, servicer: ScriptedServicer
) -> None:
    refusal = (Code.UNAVAILABLE, "no room", {"kvmesh-refusal": "no_blocks", "retry-after-ms": "7"})
    servicer.failures = [refusal] * 2
    with pytest.raises(RefusedError) as caught:
        await make(retry=RetryPolicy(attempts=2, initial_s=0.001)).generate([1])
    assert caught.value.refusal.reason is RefusalReason.NO_BLOCKS
    assert caught.value.refusal.retry_after_ms == 7
    assert len(servicer.requests) == 2


async def test_a_hint_beyond_the_deadline_is_not_waited_for(
    make: MakeCaller, servicer: ScriptedServicer
) -> None:
    hint = {"kvmesh-refusal": "quota", "retry-after-ms": "60000"}
    servicer.failures = [(Code.RESOURCE_EXHAUSTED, "slow down", hint)]
    with pytest.raises(RefusedError) as caught:
        await make().generate([1], timeout_s=20)
    assert caught.value.status == 429
    assert len(servicer.requests) == 1


@pytest.mark.parametrize(
    ("code", "trailing", "kind"),
    [
        (Code.INVALID_ARGUMENT, {"kvmesh-param": "top_p"}, InvalidRequestError),
        (Code.NOT_FOUND, {}, ModelNotFoundError),
        (Code.UNAUTHENTICATED, {}, AuthenticationError),
    ],
)
async def test_the_callers_faults_are_not_tried_again(
    make: MakeCaller,
    servicer: ScriptedServicer,
    code: grpc.StatusCode,
    trailing: dict[str, str],
    kind: type[Exception],
) -> None:
    servicer.failures = [(code, "no", trailing)]
    with pytest.raises(kind) as caught:
        await make().generate([1])
    assert len(servicer.requests) == 1
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.param == trailing.get("kvmesh-param", "model")


async def test_nothing_is_repeated_after_the_first_token(
    make: MakeCaller, servicer: ScriptedServicer
) -> None:
    servicer.fail_after_first = (Code.UNAVAILABLE, "worker gone", {"kvmesh-refusal": "lost"})
    with pytest.raises(LostError):
        await make().generate([1, 2])
    assert len(servicer.requests) == 1


async def test_a_stream_without_an_end(make: MakeCaller, servicer: ScriptedServicer) -> None:
    servicer.omit_end = True
    with pytest.raises(ProtocolError):
        await make().generate([1])


async def test_leaving_a_stream_cancels_on_the_server(
    make: MakeCaller, servicer: ScriptedServicer
) -> None:
    servicer.stall_after_first = True
    delta = await make().first([4, 5])
    assert delta.token_ids == (4,)
    async with asyncio.timeout(20):
        await servicer.cancelled.wait()


async def test_the_deadline_ends_a_stalled_generation(
    make: MakeCaller, servicer: ScriptedServicer
) -> None:
    servicer.stall_after_first = True
    with pytest.raises(DeadlineError):
        await make().generate([4, 5], timeout_s=0.5)
    async with asyncio.timeout(20):
        await servicer.cancelled.wait()


async def test_cancelling_the_task_cancels_on_the_server(
    target: str, servicer: ScriptedServicer
) -> None:
    servicer.stall_after_first = True
    first = asyncio.Event()

    async def consume(client: AsyncClient) -> None:
        async for _ in client.stream([4, 5]):
            first.set()

    async with AsyncClient(target) as client:
        task = asyncio.create_task(consume(client))
        async with asyncio.timeout(20):
            await first.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await servicer.cancelled.wait()


async def test_breaking_out_of_the_loop_cancels_on_the_server(
    target: str, servicer: ScriptedServicer
) -> None:
    servicer.stall_after_first = True

    def take(client: Client) -> None:
        for _ in client.stream([4, 5]):
            break

    with Client(target) as client:
        await asyncio.to_thread(take, client)
        async with asyncio.timeout(20):
            await servicer.cancelled.wait()


async def test_nobody_there() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # ours, but not listening: connections are refused
        port = bound.getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}", retry=NO_RETRY) as client:
            with pytest.raises(LostError):
                await client.generate("hello", timeout_s=20)
