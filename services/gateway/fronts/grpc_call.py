"""Converts a message of the public gRPC API to a checked call.

Pure. Tests: tests/integration/test_gateway_grpc.py.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.errors import InvalidRequestError, ProtocolError
from kvmesh.core.types import Placement, SamplingParams
from kvmesh.rpc.convert import placement_from_proto
from kvmesh.rpc.convert_sampling import sampling_params_from_proto
from kvmesh.v1.inference_service_pb2 import GenerateRequest
from services.gateway.api.openai import (
    ApiCall,
    ChatPrompt,
    Endpoint,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_stop,
    with_chat,
)
from services.gateway.api.schema import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from services.gateway.api.structured import check_length
from services.gateway.fronts.grpc_chat import chat_body
from services.gateway.tools.parsers import ToolFamily
from services.gateway.tools.reasoning import ReasoningFamily


def call_from_proto(
    request: GenerateRequest,
    max_stop: int,
    family: ToolFamily | None = None,
    reasoning: ReasoningFamily | None = None,
) -> ApiCall:
    """Converts a message to a checked call.

    In `sampling`, fields for which 0 makes no sense take their default when they are 0:
    top_p, repetition_penalty, max_tokens (the room that the context leaves) and seed (a random
    one).

    Args:
        family: the model's format of tool calls; None if it has none.
        reasoning: the model's marks around its thinking; None if it has none.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    sampling = SamplingParams()
    seed: int | None = None
    max_tokens: int | None = None
    if request.HasField("sampling"):
        given = _sampling(request)
        seed, max_tokens = given.seed or None, given.max_tokens or None
        sampling = replace(
            given,
            top_p=given.top_p or 1.0,
            repetition_penalty=given.repetition_penalty or 1.0,
        )
        check_sampling(sampling)
    call = ApiCall(
        endpoint=Endpoint.COMPLETION,
        model=request.model,
        prompts=(_prompt(request),),
        sampling=sampling,
        seed=seed,
        max_tokens=max_tokens,
        max_tokens_field="sampling.max_tokens",
        prompt_field=request.WhichOneof("prompt") or "prompt",
        stop=check_stop(list(request.stop), max_stop),
        stream=True,
        request_id=request.request_id,
        cache_salt=request.cache_salt,
        structure_field="sampling.structure",
    )
    # Only chats have tools, and only a chat template starts thinking.
    if request.WhichOneof("prompt") != "chat":
        return call
    try:
        return with_chat(call, chat_body(request), family, reasoning)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"chat.{error}", f"chat.{error.param}") from error


def placement_of(request: GenerateRequest) -> Placement:
    """The placement that a message asks for.

    Raises:
        InvalidRequestError: an unknown placement.
    """
    try:
        return placement_from_proto(request.placement)
    except ProtocolError as error:
        raise InvalidRequestError(str(error), "placement") from error


def _sampling(request: GenerateRequest) -> SamplingParams:
    try:
        return sampling_params_from_proto(request.sampling)
    except ProtocolError as error:
        raise InvalidRequestError(str(error), "sampling") from error


def _prompt(request: GenerateRequest) -> Prompt:
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "tokens":
            return TokenPrompt(tuple(request.tokens.token_ids))
        case "chat":
            return ChatPrompt(())  # `with_chat` fills it in
        case _:
            raise InvalidRequestError("prompt: set one of text, tokens, chat", "prompt")


# For each field, the lowest and the highest value; the same ranges as over HTTP.
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
    "num_logprobs": (-1, 20),
    "num_prompt_logprobs": (-1, 20),
}


_LENGTHS = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "allowed_token_ids": MAX_ALLOWED_TOKENS,
    "bad_words": MAX_BAD_WORDS,
}


def check_sampling(sampling: SamplingParams) -> None:
    """Checks the ranges of sampling parameters.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:
            field = f"sampling.{name}"
            raise InvalidRequestError(f"{field}: {value}; allowed: {low} to {high}", field)
    for name, longest in _LENGTHS.items():
        if len(getattr(sampling, name)) > longest:
            field = f"sampling.{name}"
            raise InvalidRequestError(f"{field}: at most {longest} entries are allowed", field)
    if any(not -100 <= bias <= 100 for _, bias in sampling.logit_bias):
        raise InvalidRequestError(
            "sampling.logit_bias: allowed: -100 to 100", "sampling.logit_bias"
        )
    if not all(sampling.bad_words):
        raise InvalidRequestError("sampling.bad_words: a word has no tokens", "sampling.bad_words")
    if sampling.structure is not None:
        check_length(sampling.structure, "sampling.structure")
