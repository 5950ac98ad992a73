"""POST /tokenize, POST /detokenize and GET /tokenizer_info, compatible with vLLM.

Tests: tests/integration/test_gateway_api.py, tests/unit/gateway/api/test_token_routes.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.answers import dumps
from services.gateway.api.messages import Messages, Tool
from services.gateway.api.model_checks import check_known
from services.gateway.api.openai import ApiCall, ChatPrompt, Prompt, TextPrompt
from services.gateway.api.schema import MAX_TOOLS, TokenId
from services.gateway.frontend import Frontend
from services.gateway.text.prompts import encode_prompt

TOKENS_PER_TURN = 512
"""Number of tokens written in one event-loop iteration, which takes less than a millisecond."""


class TokenizeBody(BaseModel):
    """POST /tokenize: a text or a chat."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    model: str | None = None
    tokens: list[TokenId]


async def tokenize(frontend: Frontend, body: TokenizeBody) -> str:
    """The token ids of a prompt as JSON, made without stalling other requests.

    Raises:
        InvalidRequestError: not exactly one of prompt and messages, or the template refuses.
    """
    token_ids = await encode_prompt(frontend.tokenizer, _prompt(body))
    tokens, texts = await json_list(token_ids, int), "null"
    if body.return_token_strs:
        texts = await json_list(token_ids, frontend.tokenizer.token_text)
    counts = dumps({"count": len(token_ids), "max_model_len": frontend.max_model_len})
    return f'{counts[:-1]},"tokens":{tokens},"token_strs":{texts}}}'


async def count_tokens(frontend: Frontend, call: ApiCall) -> int:
    """Number of prompt tokens of a chat.

    Raises:
        InvalidRequestError: the template refuses it.
    """
    (prompt,) = call.prompts
    return len(await encode_prompt(frontend.tokenizer, prompt))


async def json_list(token_ids: Sequence[int], told: Callable[[int], int | str]) -> str:
    """A JSON list with one entry per token, made over many event-loop iterations."""
    parts: list[str] = []
    for start in range(0, len(token_ids), TOKENS_PER_TURN):
        if start:
            await asyncio.sleep(0)
        parts.append(dumps([told(each) for each in token_ids[start : start + TOKENS_PER_TURN]]))
    return f"[{','.join(part[1:-1] for part in parts)}]"


def _prompt(body: TokenizeBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("prompt: give one of prompt and messages", "prompt")
    if body.prompt is not None:
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    arguments = dict(body.chat_template_kwargs or {})
    if body.tools:
        arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    messages = tuple(message.for_template() for message in body.messages or ())
    return ChatPrompt(messages, body.add_generation_prompt is not False, arguments)


def tokenizer_info(frontend: Frontend) -> dict[str, Any]:
    """The tokenizer's settings, for clients that use this server to tokenise."""
    nothing = dict.fromkeys(("bos_token", "eos_token", "pad_token", "tokenizer_class"))
    return {**nothing, **frontend.tokenizer.info}


async def detokenize(frontend: Frontend, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids.

    Raises:
        InvalidRequestError: a token is outside the vocabulary.
    """
    check_known(body.tokens, frontend.tokenizer.vocab_size, "tokens")
    return {"prompt": await frontend.tokenizer.decode(body.tokens)}
