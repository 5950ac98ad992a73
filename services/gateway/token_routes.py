"""POST /tokenize and POST /detokenize, and GET /tokenizer_info, as vLLM has them.

Tests: tests/integration/test_gateway_api.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvmesh.core.errors import InvalidRequestError
from services.gateway.frontend import Frontend
from services.gateway.messages import Messages, Tool
from services.gateway.openai import ChatPrompt, Prompt, TextPrompt, check_known, check_model
from services.gateway.prompts import encode_prompt
from services.gateway.schema import MAX_TOOLS, TokenId


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


async def tokenize(frontend: Frontend, body: TokenizeBody) -> dict[str, Any]:
    """Token ids of a prompt.

    Raises:
        InvalidRequestError: not exactly one of prompt and messages, or the template refuses.
        ModelNotFoundError: another model is asked for.
    """
    check_model(body.model or "", frontend.served_name)
    token_ids = await encode_prompt(frontend.tokenizer, _prompt(body))
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": frontend.max_model_len,
        "tokens": list(token_ids),
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = [frontend.tokenizer.token_text(token_id) for token_id in token_ids]
    return answer


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
    """What a client that leaves tokenizing to this server wants to know of the tokenizer."""
    nothing = dict.fromkeys(("bos_token", "eos_token", "pad_token", "tokenizer_class"))
    return {**nothing, **frontend.tokenizer.info}


async def detokenize(frontend: Frontend, body: DetokenizeBody) -> dict[str, Any]:
    """Text of token ids.

    Raises:
        InvalidRequestError: a token is outside the vocabulary.
        ModelNotFoundError: another model is asked for.
    """
    check_model(body.model or "", frontend.served_name)
    check_known(body.tokens, frontend.tokenizer.vocab_size, "tokens")
    return {"prompt": await frontend.tokenizer.decode(body.tokens)}
