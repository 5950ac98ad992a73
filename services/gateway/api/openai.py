"""Converts OpenAI request bodies to the gateway's own values.

Pure: pydantic models in, frozen values out. Tests: tests/unit/gateway/api/test_openai.py.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import SamplingParams
from kvmesh.core.values import changed, quick
from services.gateway.api.schema import ChatBody, CompletionBody, Prompts
from services.gateway.api.structured import structure_of
from services.gateway.config import LimitsConfig
from services.gateway.tools.parsers import ToolFamily
from services.gateway.tools.reasoning import ReasoningFamily
from services.gateway.tools.tools import ToolUse, tool_structure, tool_use

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions if the request does not set it, as in OpenAI's API."""

_SEED_MASK = 2**64 - 1


class Endpoint(enum.Enum):
    """The API that a call uses; it decides the shape of the answer."""

    CHAT = "chat.completion"
    COMPLETION = "text_completion"
    EMBEDDING = "embedding"


@quick
@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat to be rendered with the model's template."""

    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@quick
@dataclass(frozen=True, slots=True)
class ApiCall:
    """One call of the public API, checked but not yet tokenised.

    Attributes:
        sampling: seed and max_tokens are not final; see `check_prompt` and `choice_sampling`.
        seed: None asks for a random one.
        max_tokens: None takes the room that the context leaves.
        max_tokens_field: the caller's name for it, for errors.
        prompt_field: the caller's name of the prompt, for errors.
        continuous_usage: token counts on every chunk of a stream.
        tokens_as_ids: log-probabilities name tokens by their ids, not by their text.
        echo: the answer begins with the prompt.
        truncate_prompt: number of last prompt tokens to use; None for all.
        bad_words: as text; `sampling` gets their tokens later.
        tools: None if no tool may be called.
        reasoning: the marks around the thinking; None if the text is not searched for it.
        include_reasoning: the thinking is part of the answer.
        priority: among the tenant's own requests; lower goes first.
        structure_field: the field that the structure comes from, for errors.
        embedding: see `SequenceSpec.embedding`.
    """

    endpoint: Endpoint
    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    seed: int | None = None
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    prompt_field: str = "prompt"
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    return_prompt_logprobs: bool = False
    truncate_prompt: int | None = None
    bad_words: tuple[str, ...] = ()
    tools: ToolUse | None = None
    reasoning: ReasoningFamily | None = None
    include_reasoning: bool = True
    priority: int = 0
    structure_field: str = ""
    request_id: str = ""
    cache_salt: str = ""
    embedding: int = -1


def chat_call(
    body: ChatBody,
    limits: LimitsConfig,
    defaults: Mapping[str, float] | None = None,
    family: ToolFamily | None = None,
    reasoning: ReasoningFamily | None = None,
) -> ApiCall:
    """Converts the body of a chat completion.

    Args:
        defaults: sampling defaults of the model, if it has any.
        family: the model's format of tool calls; None if it has none.
        reasoning: the model's marks around its thinking; None if it has none.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    newer = body.max_completion_tokens is not None
    max_tokens = body.max_completion_tokens if newer else body.max_tokens
    name = "max_completion_tokens" if newer else "max_tokens"
    sampling = _sampling(body, defaults or {}, body.top_logprobs or 0 if body.logprobs else -1)
    call = ApiCall(
        endpoint=Endpoint.CHAT,
        prompts=(),
        max_tokens=max_tokens,
        max_tokens_field=name,
        prompt_field="messages",
        **_common(body, limits, sampling, max_tokens, name),
    )
    return with_chat(call, body, family, reasoning)


def with_chat(
    call: ApiCall,
    body: ChatBody,
    family: ToolFamily | None,
    reasoning: ReasoningFamily | None,
) -> ApiCall:
    """Gives a call a chat as its prompt, with its tools and its thinking.

    Args:
        family: the model's format of tool calls; None if it has none.
        reasoning: the model's marks around its thinking; None if it has none.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    tools = tool_use(body, family)
    arguments = _template_arguments(body)
    if tools is not None:
        arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    prompt = ChatPrompt(
        tuple(message.for_template() for message in body.messages),
        body.add_generation_prompt is not False,
        arguments,
    )
    call = _with_tools(changed(call, prompts=(prompt,), tools=tools), body)
    return with_reasoning(call, reasoning, include=body.include_reasoning is not False)


def completion_call(
    body: CompletionBody, limits: LimitsConfig, defaults: Mapping[str, float] | None = None
) -> ApiCall:
    """Converts the body of a text completion, with one or several prompts.

    Args:
        defaults: sampling defaults of the model, if it has any.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    special = body.add_special_tokens is not False
    prompts = prompts_of(body.prompt, "prompt", limits, add_special_tokens=special)
    echo = bool(body.echo)
    if body.max_tokens == 0 and not echo:
        raise InvalidRequestError("max_tokens: 0 is allowed only with echo", "max_tokens")
    sampling = _sampling(body, defaults or {}, -1 if body.logprobs is None else body.logprobs)
    if echo and sampling.num_logprobs >= 0:
        # Echoed text has log-probabilities too.
        scored = max(sampling.num_prompt_logprobs, sampling.num_logprobs)
        sampling = changed(sampling, num_prompt_logprobs=scored)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return ApiCall(
        endpoint=Endpoint.COMPLETION,
        prompts=prompts,
        max_tokens=max_tokens,
        echo=echo,
        **_common(body, limits, sampling, max_tokens, "max_tokens"),
    )


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    """Variables of the chat template. The caller's own variables override `reasoning_effort`."""
    arguments: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":
            arguments["enable_thinking"] = False  # the variable that switches thinking off
    return {**arguments, **(body.chat_template_kwargs or {})}


def with_reasoning(call: ApiCall, family: ReasoningFamily | None, *, include: bool) -> ApiCall:
    """Separates a chat's thinking from its answer.

    Args:
        family: the model's marks around its thinking; None if it has none.
        include: the answer includes the thinking.
    """
    # A structure constrains even the first token, which leaves no room for thinking.
    if family is None or call.sampling.structure is not None:
        return call
    return changed(
        call,
        reasoning=family,
        include_reasoning=include,
        skip_special_tokens=call.skip_special_tokens and not family.keeps_special_tokens,
    )


def _with_tools(call: ApiCall, body: ChatBody) -> ApiCall:
    """Adds the structure and the special tokens that the call's tools need."""
    if call.tools is None:
        return call
    structure = tool_structure(call.tools, body.tools or ())
    if structure is None:
        skips = call.skip_special_tokens and not call.tools.keeps_special_tokens
        return changed(call, skip_special_tokens=skips)
    # A forced call has no text, so a structure for text does not matter. Agents send both, one for
    # their first turn and one for their last.
    return changed(
        call, sampling=changed(call.sampling, structure=structure), structure_field="tools"
    )


def prompts_of(
    given: Prompts, name: str, limits: LimitsConfig, *, add_special_tokens: bool
) -> tuple[Prompt, ...]:
    """The prompts in a field that takes one or several, as text or as token ids.

    Args:
        name: the field, for errors.

    Raises:
        InvalidRequestError: none, or too many.
    """
    if isinstance(given, str):
        return (TextPrompt(given, add_special_tokens),)
    if given and isinstance(given[0], int):
        given = [given]  # one prompt, given as token ids
    found: list[Prompt] = []
    for entry in given:
        if isinstance(entry, str):
            found.append(TextPrompt(entry, add_special_tokens))
        else:
            assert isinstance(entry, list)
            found.append(TokenPrompt(tuple(entry)))
    if not 1 <= len(found) <= limits.max_prompts:
        raise InvalidRequestError(
            f"{name} must hold 1 to {limits.max_prompts} prompts, got {len(found)}", name
        )
    return tuple(found)


def _common(
    body: ChatBody | CompletionBody,
    limits: LimitsConfig,
    sampling: SamplingParams,
    max_tokens: int | None,
    max_tokens_field: str,
) -> dict[str, Any]:
    """The fields of a call that both endpoints share."""
    n = body.n or 1
    if n > limits.max_choices:
        raise InvalidRequestError(f"n must be at most {limits.max_choices}, got {n}", "n")
    stream, options = bool(body.stream), body.stream_options
    if options is not None and not stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    if body.prompt_logprobs is not None and stream:
        raise InvalidRequestError("prompt_logprobs: not together with stream", "prompt_logprobs")
    if max_tokens is not None and body.min_tokens is not None and body.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens must be at most {max_tokens_field} ({max_tokens})", "min_tokens"
        )
    structure, structure_field = structure_of(body)
    if structure is not None:
        sampling = changed(sampling, structure=structure)
    truncate = body.truncate_prompt_tokens
    return {
        "model": body.model or "",
        "sampling": sampling,
        "structure_field": structure_field,
        "return_prompt_logprobs": body.prompt_logprobs is not None,
        "truncate_prompt": None if truncate in (None, -1) else truncate,
        "bad_words": _bad_words(body.bad_words or ()),
        "continuous_usage": bool(options is not None and options.continuous_usage_stats),
        "seed": None if body.seed is None else body.seed & _SEED_MASK,
        "n": n,
        "stop": check_stop(body.stop, limits.max_stop),
        "include_stop": bool(body.include_stop_str_in_output),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "stream": stream,
        "include_usage": bool(options is not None and options.include_usage),
        "return_token_ids": bool(body.return_token_ids),
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
        "priority": body.priority or 0,
        "request_id": body.request_id or "",
        "cache_salt": body.cache_salt or "",
    }


def check_stop(stop: str | list[str] | None, limit: int) -> tuple[str, ...]:
    """The stop strings as a tuple.

    Raises:
        InvalidRequestError: there are too many, or one is empty.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limit:
        raise InvalidRequestError(f"stop must hold at most {limit} strings", "stop")
    if not all(stops):
        raise InvalidRequestError("stop must not hold an empty string", "stop")
    return stops


def _sampling(
    body: ChatBody | CompletionBody, defaults: Mapping[str, float], num_logprobs: int
) -> SamplingParams:
    given = body.model_fields_set
    # Few bodies set more than one or two of these.
    numbers: dict[str, Any] = {
        name: float(defaults.get(name, _DEFAULTS[name]) if value is None else value)
        for name in _DEFAULTS
        if name in given or name in defaults
        for value in (getattr(body, name),)
    }
    return SamplingParams(
        num_logprobs=num_logprobs,
        top_k=max(int(numbers.pop("top_k", 0)), 0),  # vLLM's -1 keeps all tokens
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        num_prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
        **numbers,
    )


_DEFAULTS: Mapping[str, float] = {
    name: getattr(SamplingParams(), name)
    for name in (
        *("temperature", "top_p", "top_k", "min_p"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
}


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for name in given:
        if not (name.isascii() and name.isdecimal()):
            raise InvalidRequestError(
                f"logit_bias: {name!r} is no token id; allowed: numbers as text", "logit_bias"
            )
    return tuple((int(name), bias) for name, bias in given.items())


def _bad_words(words: Sequence[str]) -> tuple[str, ...]:
    if not all(words):
        raise InvalidRequestError("bad_words must not hold an empty string", "bad_words")
    return tuple(words)
