"""The public gRPC API: the same request flow as HTTP, with messages instead of bodies and events.

Tests: tests/integration/test_gateway_grpc.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias

import grpc

from kvmesh.core.errors import InvalidRequestError, KvMeshError, RefusedError
from kvmesh.core.types import FinishReason, RefusalReason, TokenLogprobs, Usage
from kvmesh.rpc.convert import finish_reason_to_proto, placement_to_proto, usage_to_proto
from kvmesh.rpc.convert_sampling import token_logprobs_to_proto
from kvmesh.v1.inference_service_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    PlacedAt,
    ResumePoint,
    ToolCallDelta,
)
from kvmesh.v1.inference_service_pb2_grpc import InferenceServiceServicer
from services.gateway.api.model_checks import check_room
from services.gateway.entrance import Entrance
from services.gateway.errors import (
    QUOTA_HEADER,
    REFUSAL_HEADER,
    QuotaError,
    StageRefusedError,
    message_for,
)
from services.gateway.frontend import Frontend, clean_request_id, usage_of
from services.gateway.fronts.grpc_call import call_from_proto, placement_of
from services.gateway.fronts.grpc_chat import CallDeltas
from services.gateway.request.choice import Behind, Caller, Choice, Delivered, prompt_sum
from services.gateway.request.delivery import delivered_text, pulled
from services.gateway.request.mesh import Placed
from services.gateway.tenants.admission import Ticket
from services.gateway.text.tokenizer import TextTokenizer
from services.gateway.tools.reasoning import Thoughts, thinking_at
from services.gateway.tools.thinking_count import ThinkingCount
from services.gateway.tools.told import Told
from services.gateway.tools.tools import ToolReader

ServerContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class InferenceServicer(InferenceServiceServicer):
    """InferenceService."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    async def Generate(
        self, request: GenerateRequest, context: ServerContext
    ) -> AsyncIterator[GenerateResponse]:
        """Generates from one prompt."""
        metadata = _metadata(context)
        request_id = clean_request_id(request.request_id)
        try:
            async with self._entrance.admit(metadata.get("authorization", "")) as ticket:
                arrived_at = asyncio.get_running_loop().time()
                await context.send_initial_metadata((("x-request-id", request_id),))
                await self._entrance.turn(arrived_at, request.ttft_deadline_ms)
                caller = _caller(request, arrived_at, request_id, metadata, ticket)
                frontend = self._entrance.of(request.model)
                choice = await _prepare(frontend, request, caller)
                async for response in _responses(frontend, choice, request_id):
                    yield response
        except KvMeshError as error:
            await _abort(context, error)

    async def ListModels(
        self, request: ListModelsRequest, context: ServerContext
    ) -> ListModelsResponse:
        """Lists the models that are served."""
        try:
            self._entrance.check_key(_metadata(context).get("authorization", ""))
        except KvMeshError as error:
            await _abort(context, error)
        entrance = self._entrance
        models = [
            Model(name=name, max_model_len=entrance.of(name).max_model_len)
            for name in entrance.names
        ]
        return ListModelsResponse(models=models)


async def _prepare(frontend: Frontend, request: GenerateRequest, caller: Caller) -> Choice:
    chat = frontend.tokenizer.chat
    limits = frontend.limits
    families = (chat.tool_family, chat.reasoning_family)
    if request.WhichOneof("prompt") == "tokens":
        # Before the ids become Python objects: a message can hold up to 30 million of them.
        check_room("tokens", len(request.tokens.token_ids), frontend.max_model_len)
    call = call_from_proto(request, limits.max_stop, *families)
    delivered: Delivered | None = None
    if request.HasField("resume"):
        point = request.resume
        check_room("resume.token_ids", len(point.token_ids), frontend.max_model_len)
        behind = Behind(tuple(point.token_ids), point.cached_tokens, is_complete=False)
        # A client's claim does not prove payment, so the prompt is charged again.
        checkpoints = (point.model_fingerprint,)
        delivered = Delivered(point.seed, point.prompt_sum, False, checkpoints, (behind,))
    (choice,) = await frontend.prepare(call, caller, delivered)
    return choice


async def _responses(
    frontend: Frontend, choice: Choice, request_id: str
) -> AsyncIterator[GenerateResponse]:
    tokenizer = frontend.tokenizer
    sink = _ResponseSink(choice, tokenizer, request_id)
    if choice.behind is not None:
        text = delivered_text(tokenizer, choice, choice.behind.token_ids)
        sink.resume(choice.behind, text)
    work = frontend.run([choice], [sink])
    async with aclosing(pulled(work, sink.responses)) as responses:
        async for response in responses:
            yield response


def _caller(
    request: GenerateRequest,
    arrived_at: float,
    request_id: str,
    metadata: dict[str, str],
    ticket: Ticket,
) -> Caller:
    return Caller(
        arrived_at=arrived_at,
        request_id=request_id,
        scenario=request.scenario,
        placement=placement_of(request),
        ttft_ms=request.ttft_deadline_ms,
        tpot_ms=request.tpot_limit_ms,
        itl_ms=request.itl_limit_ms,
        traceparent=metadata.get("traceparent", ""),
        ticket=ticket,
    )


class _ResponseSink:
    """Writes one generation as messages.

    Attributes:
        responses: the queue of messages; see `pulled`.
    """

    def __init__(self, choice: Choice, tokenizer: TextTokenizer, request_id: str) -> None:
        self._request_id = request_id
        self._choice = choice
        self._prompt_ids = choice.request.prompt_ids
        self._token_ids: list[int] = []
        thinking = thinking_at(choice.call.reasoning, self._prompt_ids, tokenizer.token_text)
        self._thoughts = None if thinking is None else Thoughts(thinking)
        self._shows_thoughts = choice.call.include_reasoning
        self._count = None if thinking is None else ThinkingCount(thinking, tokenizer.token_bytes)
        tools = choice.call.tools
        self._calls = None if tools is None else CallDeltas(ToolReader(tools, request_id))
        self._where: Placed
        self._cached_tokens = 0
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._point: ResumePoint | None = None
        self.responses: asyncio.Queue[GenerateResponse | None] = asyncio.Queue()

    def placed(self, where: Placed) -> None:
        self._where = where

    def first(self, cached_tokens: int, prompt_logprobs: Sequence[TokenLogprobs], _: bytes) -> None:
        self._cached_tokens, self._prompt_logprobs = cached_tokens, prompt_logprobs
        seed, checksum = self._choice.call.seed or 0, prompt_sum([self._choice])
        self._point = ResumePoint(
            seed=seed,
            prompt_sum=checksum,
            cached_tokens=cached_tokens,
        )

    def resume(self, behind: Behind, text: str) -> None:
        """Continues after the part that another gateway sent; `text` is the text of its tokens."""
        self.first(behind.cached_tokens, (), b"")
        self._note(behind.token_ids)
        self._told(text, is_last=False)

    def stopped(self, stop: str) -> None:
        pass  # the message has no field for it

    def push(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        finish: FinishReason | None,
    ) -> None:
        self._note(token_ids)
        point, self._point = self._point, None
        if point is not None:
            point.model_fingerprint = self._where.checkpoint
        told, calls = self._told(text, is_last=finish is not None)
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        response = GenerateResponse(
            request_id=self._request_id,
            text=told.answer,
            reasoning=told.reasoning if self._shows_thoughts else "",
            tool_calls=calls,
            token_ids=token_ids,
            logprobs=[token_logprobs_to_proto(entry) for entry in logprobs],
            finish_reason=finish_reason_to_proto(finish),
            prompt_logprobs=map(token_logprobs_to_proto, prompt_logprobs),
            placed=placed_to_proto(self._where),
            resume=point,
        )
        if finish is not None:
            response.usage.CopyFrom(usage_to_proto(self._usage()))
        self.responses.put_nowait(response)

    def _note(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        if self._count is not None:  # per piece: counting thousands at the end would stall others
            self._count.of(self._token_ids)

    def _told(self, text: str, *, is_last: bool) -> tuple[Told, list[ToolCallDelta]]:
        """Adds text; returns thinking and answer, and the parts of tool calls."""
        told, calls = Told("", text), list[ToolCallDelta]()
        if self._thoughts is not None:
            told = self._thoughts.told(0, text, last=is_last)
        if self._calls is not None:
            answer, calls = self._calls.push(told.answer, last=is_last)
            told = Told(told.reasoning, answer)
        return told, calls

    def _usage(self) -> Usage:
        """Token counts of the generation so far."""
        reasoning = 0 if self._count is None else self._count.of(self._token_ids)
        num_tokens = len(self._token_ids)
        return usage_of(len(self._prompt_ids), num_tokens, self._cached_tokens, reasoning)


def placed_to_proto(placed: Placed) -> PlacedAt:
    """Converts the workers that run a request to a message."""
    return PlacedAt(
        placement=placement_to_proto(placed.placement),
        prefill_worker=placed.prefill_worker,
        decode_worker=placed.decode_worker,
    )


def _metadata(context: ServerContext) -> dict[str, str]:
    """The call's text metadata."""
    entries = context.invocation_metadata() or ()
    return {str(key): value for key, value in entries if isinstance(value, str)}


async def _abort(context: ServerContext, error: KvMeshError) -> NoReturn:
    await context.abort(_STATUS[status_name(error)], message_for(error), trailing_metadata(error))


_STATUS = {code.name: code for code in grpc.StatusCode}


def status_name(error: KvMeshError) -> str:
    """The gRPC status of an error; the caller's own quota is RESOURCE_EXHAUSTED."""
    if isinstance(error, RefusedError) and error.refusal.reason is RefusalReason.QUOTA:
        return "RESOURCE_EXHAUSTED"
    return error.grpc_status


def trailing_metadata(error: KvMeshError) -> tuple[tuple[str, str], ...]:
    """An error's trailing metadata, beside status and message."""
    if isinstance(error, RefusedError):
        label = error.label if isinstance(error, StageRefusedError) else error.refusal.reason.value
        entries: tuple[tuple[str, str], ...] = (
            (REFUSAL_HEADER.removeprefix("x-"), label),
            ("retry-after-ms", str(error.refusal.retry_after_ms)),
        )
        if isinstance(error, QuotaError):
            entries += ((QUOTA_HEADER.removeprefix("x-"), error.quota.value),)
        return entries
    if isinstance(error, InvalidRequestError) and error.param:
        return (("kvmesh-param", error.param),)
    return ()
