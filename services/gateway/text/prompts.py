"""Tokenises the texts of a call: its prompts and its bad words.

Tests: tests/integration/test_gateway_api.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvmesh.core.errors import InvalidRequestError
from services.gateway.api.openai import ApiCall, ChatPrompt, Prompt, TextPrompt
from services.gateway.api.structured import check_schemas, check_structure, has_references
from services.gateway.text.tokenizer import TextTokenizer


async def encode_prompt(tokenizer: TextTokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Tokenises a prompt.

    Raises:
        InvalidRequestError: the chat template does not accept it.
    """
    if isinstance(prompt, ChatPrompt):
        text = tokenizer.chat.render(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            arguments=prompt.template_arguments,
        )
        # The template writes special tokens itself.
        return await tokenizer.encode(text, add_special_tokens=False)
    if isinstance(prompt, TextPrompt):
        return await tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
    return prompt.token_ids


async def prompt_ids(tokenizer: TextTokenizer, call: ApiCall, prompt: Prompt) -> tuple[int, ...]:
    """Tokenises one of a call's prompts, truncated if the call asks for it.

    Raises:
        InvalidRequestError: the chat template does not accept the prompt.
    """
    token_ids = await encode_prompt(tokenizer, prompt)
    if call.truncate_prompt is not None:
        token_ids = token_ids[max(0, len(token_ids) - call.truncate_prompt) :]
    return token_ids


async def prompt_text(tokenizer: TextTokenizer, prompt: Prompt, token_ids: tuple[int, ...]) -> str:
    """The prompt's text, for an echo."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return await tokenizer.decode(token_ids)


async def with_tokens(tokenizer: TextTokenizer, call: ApiCall) -> ApiCall:
    """Adds the bad words' tokens to a call, after checking its structure and its tools' schemas.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    sampling = call.sampling
    if sampling.structure is not None:
        await asyncio.to_thread(check_structure, sampling.structure, call.structure_field)
    schemas = {} if call.tools is None else call.tools.schemas
    if has_references(schemas.values()):
        await asyncio.to_thread(check_schemas, schemas)
    if not call.bad_words:
        return call
    words: list[tuple[int, ...]] = list(sampling.bad_words)
    for word in call.bad_words:
        # A word at the start of a text and a word after a space have different tokens.
        forms = {await tokenizer.encode(form, add_special_tokens=False) for form in _forms(word)}
        words += sorted(forms)
    if not all(words):
        raise InvalidRequestError("bad_words: a word has no tokens", "bad_words")
    return replace(call, sampling=replace(sampling, bad_words=tuple(words)))


def _forms(word: str) -> tuple[str, str]:
    bare = word.lstrip(" ")
    return (bare, f" {bare}")
