"""The callers' arguments and results, and their conversion to messages; pure.

Tests: tests/unit/client/test_messages.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from kvmesh.client.tools import (
    Message,
    ToolCall,
    ToolCallDelta,
    ToolOptions,
    call_deltas,
    joined_calls,
    message_to_proto,
    set_tools,
)
from kvmesh.core.errors import InvalidRequestError, ProtocolError
from kvmesh.core.types import (
    FinishReason,
    Placement,
    SamplingParams,
    Structure,
    TokenLogprobs,
    Usage,
)
from kvmesh.rpc.convert import (
    finish_reason_from_proto,
    placement_from_proto,
    placement_to_proto,
    usage_from_proto,
)
from kvmesh.rpc.convert_sampling import sampling_params_to_proto, token_logprobs_from_proto
from kvmesh.v1 import inference_service_pb2 as pb

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Sequence[Mapping[str, str]]
"""Text, token ids, or a chat to be rendered with the model's template."""


class SamplingOptions(TypedDict, total=False):
    """Parameters of sampling. Absent fields take the defaults of `SamplingParams`.

    If no field is given at all, the gateway's defaults for the model apply.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    num_logprobs: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[Sequence[int]]
    num_prompt_logprobs: int
    structure: Structure


class GenerateOptions(SamplingOptions, ToolOptions, total=False):
    """All arguments of a generation except its prompt.

    Keys:
        model: absent takes the client's default model.
        stop: a string or strings that end generation; not part of the output.
        timeout_s: for the whole call, retries included.
        ttft_deadline_s: time to the first token after which the gateway refuses.
        tpot_limit_s: longest accepted mean time per token; workers that would take longer are not
            asked.
        itl_limit_s: longest accepted time between two tokens; prompts that a worker computes
            between them are cut into parts that keep it.
        request_id: identity in logs and traces; made by the gateway when absent.
        scenario: routing class of the request.
        cache_salt: keeps cached prefixes of callers with other salts apart.
        placement: override for tests and debugging.
        include_reasoning: whether the thinking of a chat is sent; default true.
        metadata: sent with this call, besides the client's own; `traceparent` for example.
    """

    model: str
    stop: str | Sequence[str]
    timeout_s: float
    ttft_deadline_s: float
    tpot_limit_s: float
    itl_limit_s: float
    request_id: str
    scenario: str
    cache_salt: str
    placement: Placement
    include_reasoning: bool
    metadata: Mapping[str, str]


_SAMPLING_KEYS = frozenset(SamplingOptions.__annotations__)
_TOOL_KEYS = frozenset(ToolOptions.__annotations__)
_KEYS = frozenset(GenerateOptions.__annotations__) | _SAMPLING_KEYS | _TOOL_KEYS


@dataclass(frozen=True, slots=True)
class PlacedAt:
    """The workers that run a request."""

    placement: Placement
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a generation.

    Attributes:
        text: may be empty while a character is incomplete.
        logprobs: one entry per token if asked for.
        finish_reason: set on the last piece.
        usage: set on the last piece.
        prompt_logprobs: set on the first piece if asked for, for all prompt tokens but the first.
        placed: the workers that generated it; None from a gateway that does not report them.
        reasoning: the model's thinking before the answer of a chat; comes before the text.
        tool_calls: parts of calls; their text is not in `text`.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    usage: Usage | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    placed: PlacedAt | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation; its fields combine those of all its `Delta`s."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    placed: PlacedAt | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the gateway serves."""

    name: str
    max_model_len: int


def request_message(
    prompt: Prompt, options: GenerateOptions, default_model: str
) -> pb.GenerateRequest:
    """Converts a request to a message.

    Raises:
        InvalidRequestError: a prompt of another type, or a value that the message cannot hold.
        TypeError: an unknown option.
    """
    unknown = set(options) - _KEYS
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    stop = options.get("stop", ())
    message = pb.GenerateRequest(
        model=options.get("model", default_model),
        stop=(stop,) if isinstance(stop, str) else stop,
        request_id=options.get("request_id", ""),
        ttft_deadline_ms=_milliseconds(options.get("ttft_deadline_s", 0.0), "ttft_deadline_s"),
        tpot_limit_ms=_milliseconds(options.get("tpot_limit_s", 0.0), "tpot_limit_s"),
        itl_limit_ms=_milliseconds(options.get("itl_limit_s", 0.0), "itl_limit_s"),
        scenario=options.get("scenario", ""),
        cache_salt=options.get("cache_salt", ""),
        placement=placement_to_proto(options.get("placement", Placement.AUTO)),
        include_reasoning=options.get("include_reasoning"),
    )
    _set_prompt(message, prompt)
    _set_tools(message, options)
    _set_sampling(message, options)
    return message


def _milliseconds(seconds: float, name: str) -> int:
    if not 0 <= seconds < 4_000_000:
        raise InvalidRequestError(f"{seconds} s is not a valid limit", name)
    # 0 would mean "the default", so a tiny limit becomes one millisecond.
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


def _set_prompt(message: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
        return
    try:
        if prompt and isinstance(prompt[0], Mapping):
            chat: Sequence[Any] = prompt
            message.chat.messages.extend(map(message_to_proto, chat))
        else:
            tokens: Sequence[Any] = prompt
            message.tokens.token_ids.extend(tokens)
            message.tokens.SetInParent()  # the server decides about an empty prompt
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidRequestError(
            f"a prompt is text, token ids or chat messages with role and content: {error}", "prompt"
        ) from error


def _set_tools(message: pb.GenerateRequest, options: GenerateOptions) -> None:
    given = {key: value for key, value in options.items() if key in _TOOL_KEYS}
    if not given:
        return
    if not message.HasField("chat"):
        raise InvalidRequestError(f"{', '.join(given)}: only with a chat", min(given))
    try:
        set_tools(message.chat, given)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(f"{', '.join(given)}: {error}", min(given)) from error


def _set_sampling(message: pb.GenerateRequest, options: GenerateOptions) -> None:
    given: dict[str, Any] = {key: value for key, value in options.items() if key in _SAMPLING_KEYS}
    if not given:
        return
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        if name in given:
            given[name] = tuple(given[name])
    try:
        if "logit_bias" in given:
            given["logit_bias"] = tuple(given["logit_bias"].items())
        message.sampling.CopyFrom(sampling_params_to_proto(SamplingParams(**given)))
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(str(error), "sampling") from error


def delta_of(message: pb.GenerateResponse) -> Delta:
    """Converts a message to a piece."""
    return Delta(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(token_logprobs_from_proto(entry) for entry in message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        usage=usage_from_proto(message.usage) if message.HasField("usage") else None,
        prompt_logprobs=tuple(token_logprobs_from_proto(each) for each in message.prompt_logprobs),
        placed=_placed_of(message),
        reasoning=message.reasoning,
        tool_calls=call_deltas(message),
    )


def _placed_of(message: pb.GenerateResponse) -> PlacedAt | None:
    if not message.HasField("placed"):
        return None
    placed = message.placed
    return PlacedAt(
        placement_from_proto(placed.placement), placed.prefill_worker, placed.decode_worker
    )


def generation_of(deltas: Iterable[Delta]) -> Generation:
    """Joins the pieces, in order, to the whole generation.

    Raises:
        ProtocolError: the last piece has no finish reason.
    """
    pieces = list(deltas)
    last = pieces[-1] if pieces else None
    if last is None or last.finish_reason is None:
        raise ProtocolError("no_finish_reason", "the stream ended before the generation did")
    tokens = tuple(token for piece in pieces for token in piece.token_ids)
    return Generation(
        request_id=last.request_id,
        text="".join(piece.text for piece in pieces),
        token_ids=tokens,
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
        finish_reason=last.finish_reason,
        usage=last.usage or Usage(0, len(tokens), 0),
        prompt_logprobs=pieces[0].prompt_logprobs,
        placed=last.placed,
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=joined_calls(part for piece in pieces for part in piece.tool_calls),
    )


def models_of(message: pb.ListModelsResponse) -> list[Model]:
    """Converts a message to the models."""
    return [Model(entry.name, entry.max_model_len) for entry in message.models]
