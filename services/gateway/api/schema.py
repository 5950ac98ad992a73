"""Bodies of the OpenAI API as pydantic models: types, ranges and unsupported fields.

Unknown fields are ignored. A known field that would change the output and is not supported is an
error unless it has its default. Pure. Tests: tests/unit/gateway/api/test_openai.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.messages import Messages, NamedChoice, Tool
from services.gateway.api.structured import StructureFields

BodyT = TypeVar("BodyT", bound=BaseModel)

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS = 64
MAX_TOOLS = 128

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""Amount of thinking before the answer."""

TokenId = Annotated[int, Field(ge=0, lt=2**32)]


class StreamOptions(BaseModel):
    """Whether a stream has token counts, at its end or on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


Bias = Annotated[float, Field(ge=-100, le=100)]


class _SamplingBody(StructureFields):
    """Fields that both endpoints share."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**32)
    min_tokens: int | None = Field(None, ge=0, lt=2**32)
    ignore_eos: bool | None = None
    logit_bias: dict[str, Bias] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    allowed_token_ids: list[TokenId] | None = Field(None, max_length=MAX_ALLOWED_TOKENS)
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**32)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    user: str | None = None
    request_id: str | None = None
    cache_salt: str | None = Field(None, max_length=256)


class ChatBody(_SamplingBody):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# Without `fail_fast`, a long prompt of the wrong type fails once per token and per form.
_Texts = Annotated[list[str], Field(fail_fast=True)]
_TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
_TokenLists = Annotated[list[list[TokenId]], Field(fail_fast=True)]

Prompts = str | _Texts | _TokenIds | _TokenLists
"""One prompt or several, as text or as token ids."""


class CompletionBody(_SamplingBody):
    """POST /v1/completions."""

    max_tokens: int | None = Field(None, ge=0, lt=2**32)
    echo: bool | None = None
    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = None


# For each field, the values that mean "not used"; None (absent) is always allowed.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "web_search_options": (),
}


def parse_body(
    kind: type[BodyT],
    content: Any,
    unsupported: Mapping[str, tuple[Any, ...]] = _UNSUPPORTED,
) -> BodyT:
    """Parses a request body from decoded JSON.

    Args:
        unsupported: fields that are refused unless they are null or have one of these values.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    if not isinstance(content, Mapping):
        raise InvalidRequestError("the body must be a JSON object")
    _refuse_unsupported(content, unsupported)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _as_invalid_request(error) from error


def _refuse_unsupported(
    content: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]
) -> None:
    for name, defaults in unsupported.items():
        value = content.get(name)
        if value is None or any(value == default for default in defaults):
            continue
        allowed = ", ".join(["null", *(repr(default) for default in defaults)])
        raise InvalidRequestError(
            f"{name} is not supported; allowed: {allowed}", name, "unsupported_parameter"
        )
    best_of = content.get("best_of")
    if best_of is not None and best_of != (content.get("n") or 1):
        raise InvalidRequestError(
            "best_of is not supported; allowed: null or the value of n",
            "best_of",
            "unsupported_parameter",
        )


def _as_invalid_request(error: ValidationError) -> InvalidRequestError:
    """Converts the first problem to OpenAI's form."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    param = _field_path(first["loc"])
    # A field with several forms fails once per form; the message lists all forms.
    same = [problem for problem in problems if problem["loc"][:1] == first["loc"][:1]]
    unknown = [problem for problem in same if _is_unknown_type(problem)]
    if unknown:  # the unknown type is more helpful than the list of forms
        allowed = unknown[0]["msg"].removeprefix("Input should be ")
        message = f"{param}: type {unknown[0]['input']!r} is not supported; allowed: {allowed}"
        return InvalidRequestError(message, param, "invalid_value")
    messages = list(dict.fromkeys(problem["msg"] for problem in same))
    shown = "; or ".join(messages[:4])
    return InvalidRequestError(f"{param}: {shown}", param, "invalid_value")


def _is_unknown_type(problem: Mapping[str, Any]) -> bool:
    """Whether an object names a type that its field does not accept."""
    is_type = problem["loc"][-1:] == ("type",) and problem["type"] == "literal_error"
    return is_type and isinstance(problem["input"], str)


def _field_path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` from pydantic's location, without the names of union members."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step in ("str", "list") or "[" in step or step[:1].isupper():
            break
        else:
            path += f".{step}" if path else step
    return path
