"""Plain chat bodies to calls, past the models of all that a body may hold.

Most bodies are text messages and a few numbers. What is not exactly that (another field, another
type, a number out of its range) is not for this reader to judge: it is left to `schema.py` and
`openai.py`, which say the same about bodies that are plain.
Pure. Tests: tests/unit/gateway/api/test_plain_call.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmesh.core.types import SamplingParams
from services.gateway.api.messages import MAX_MESSAGES
from services.gateway.api.openai import ApiCall, ChatPrompt, Endpoint

_FIELDS = frozenset(
    {"model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
    | {"temperature", "top_p", "seed", "ignore_eos"}
)
_MESSAGE = {"role", "content"}
_OPTIONS = {"include_usage"}
_MAX_TOKENS = 2**32 - 1
_MAX_SEED = 2**63 - 1


def plain_chat_call(content: Any, defaults: Mapping[str, float]) -> ApiCall | None:
    """The call of a plain chat body; None if it is not one.

    Args:
        content: decoded JSON.
        defaults: sampling defaults of the model; a model that has some has no plain bodies.
    """
    if type(content) is not dict or defaults or not _FIELDS.issuperset(content):
        return None
    get = content.get
    prompt, model, options = _prompt(get("messages")), get("model", ""), get("stream_options")
    newer = get("max_completion_tokens") is not None
    max_tokens = get("max_completion_tokens" if newer else "max_tokens")
    stream, ignore_eos, seed = get("stream", False), get("ignore_eos", False), get("seed")
    temperature, top_p = get("temperature", 1.0), get("top_p", 1.0)
    if (
        prompt is None
        or type(model) is not str
        or (newer and "max_tokens" in content)
        or not (max_tokens is None or _is_int(max_tokens, 1, _MAX_TOKENS))
        or type(stream) is not bool
        or type(ignore_eos) is not bool
        or not (seed is None or _is_int(seed, 0, _MAX_SEED))
        or not _is_number(temperature, 2.0)
        or not (_is_number(top_p, 1.0) and top_p > 0)
        or not (options is None or (stream and _are_options(options)))
    ):
        return None
    return ApiCall(
        endpoint=Endpoint.CHAT,
        model=model,
        prompts=(prompt,),
        sampling=SamplingParams(
            temperature=float(temperature), top_p=float(top_p), ignore_eos=ignore_eos
        ),
        seed=seed,
        max_tokens=max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        prompt_field="messages",
        stream=stream,
        include_usage=options is not None and options.get("include_usage", False),
    )


def _prompt(messages: Any) -> ChatPrompt | None:
    if type(messages) is not list or not 0 < len(messages) <= MAX_MESSAGES:
        return None
    for message in messages:
        if type(message) is not dict or message.keys() != _MESSAGE:
            return None
        if type(message["role"]) is not str or type(message["content"]) is not str:
            return None
        if not message["role"]:
            return None
    return ChatPrompt(tuple(messages))


def _is_int(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


def _are_options(options: Any) -> bool:
    return (
        type(options) is dict
        and _OPTIONS.issuperset(options)
        and type(options.get("include_usage", False)) is bool
    )
