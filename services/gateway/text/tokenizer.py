"""Tokenizer and chat template of a model, without torch or transformers.

Reads the files of the model folder that concern text.
Tests: tests/unit/gateway/text/test_tokenizer.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.runtime import new_context

from kvmesh.core.errors import CheckpointError, InvalidRequestError
from kvmesh.engine.chat_template import SETTINGS_FILE, read_chat_template
from kvmesh.engine.checkpoint import load_model_config
from kvmesh.engine.json_fields import read_json_if_any
from kvmesh.engine.template_sandbox import compile_chat_template
from services.gateway.text.detokenizer import WholeTokens
from services.gateway.text.text_encoder import TextEncoder
from services.gateway.tools.parsers import ToolFamily, family_named
from services.gateway.tools.reasoning import ReasoningFamily, reasoning_named

TOKENIZER_FILE = "tokenizer.json"

THREAD_THRESHOLD_TOKENS = 4096
"""Tokens above which decoding runs in a thread: it would stall all streams for over 1 ms."""

TOLD_SETTINGS = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"),
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "model_max_length"),
    *("padding_side", "truncation_side", "clean_up_tokenization_spaces", "split_special_tokens"),
    *("spaces_between_special_tokens", "use_default_system_prompt", "errors", "tokenizer_class"),
)
"""Settings of tokenizer_config.json that clients may see.

Other settings may contain hub tokens, or paths of the machine that wrote them.
"""

_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError),
    *(ArithmeticError, LookupError, RecursionError),
)
"""Errors that messages can cause in a template, since it splits, counts and formats them."""


class ChatTemplate:
    """A model's chat template, rendered as transformers does but in a sandbox.

    Args:
        source: Jinja text; empty means that the model has none.
        special_tokens: names such as `bos_token` that templates may use.
        tool_family: the model's format of tool calls; None if it has none.
        reasoning_family: the model's marks around its thinking; None if it has none.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_family: ToolFamily | None = None,
        reasoning_family: ReasoningFamily | None = None,
    ) -> None:
        self.tool_family = tool_family
        self.reasoning_family = reasoning_family
        template = compile_chat_template(source) if source else None
        self._template = template
        # DeepSeek R1's template shows calls only without content; an empty text counts as content.
        self._wants_none = "'assistant' and message['content'] is none" in source
        # Variables of every rendering; `Template.render` would copy them twice per call.
        self._known = {} if template is None else {**template.globals, **special_tokens}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the prompt text of a chat.

        Args:
            messages: `role` and `content` each, in order.
            arguments: further variables of the template.

        Raises:
            InvalidRequestError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", "messages"
            )
        variables = {
            **self._known,
            **(arguments or {}),
            "messages": [self._adapted(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            template = self._template
            context = new_context(
                template.environment, template.name, template.blocks, variables, shared=True
            )
            return "".join(self._template.root_render_func(context))
        except _TEMPLATE_ERRORS as error:
            message = f"the chat template does not accept these messages: {error}"
            raise InvalidRequestError(message, "messages") from error

    def _adapted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message in the format that this template expects."""
        if message["role"] != "assistant":
            return message
        thought = message.get("reasoning_content")
        has_both = bool(message["content"] and message.get("tool_calls"))
        if thought and not has_both and self.reasoning_family is ReasoningFamily.OPENAI_GPTOSS:
            # gpt-oss uses another name; a message with calls may have either text or thinking.
            message = {**message, "thinking": thought}
        if self._wants_none and not message["content"] and message.get("tool_calls"):
            message = {**message, "content": None}
        return message


class TextTokenizer:
    """A model's tokenizer and chat template.

    Attributes:
        fast: the tokenizer itself, for incremental decoding.
        encoder: turns texts into token ids.
        whole: tokens that need no decoding; None if a token's text depends on its context.
        chat: the chat template.
        max_model_len: longest sequence by the model's own config; 0 is unknown.
        sampling_defaults: the model's own temperature, top_p, …, if it has any.
        info: the `TOLD_SETTINGS` of tokenizer_config.json, for clients; special tokens as text,
            and the chat template in use.
    """

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        chat: ChatTemplate,
        *,
        max_model_len: int = 0,
        sampling_defaults: Mapping[str, float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.info = dict(info or {})
        self.fast = fast
        self.chat = chat
        self.max_model_len = max_model_len
        self.sampling_defaults = dict(sampling_defaults or {})
        self.vocab_size: int = fast.get_vocab_size(with_added_tokens=True)
        self._special_ids = {
            token_id for token_id, token in fast.get_added_tokens_decoder().items() if token.special
        }
        self._byte_level = "ByteLevel" in type(fast.decoder).__name__
        self._byte_fallback = bool(getattr(fast.model, "byte_fallback", False))
        self.whole = WholeTokens(fast, byte_level_table()) if self._byte_level else None
        self.encoder = TextEncoder(fast)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; long texts do not block the event loop."""
        return await self.encoder.encode(text, add_special_tokens=add_special_tokens)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; long lists do not block the event loop."""
        ids = list(token_ids)
        if len(ids) > THREAD_THRESHOLD_TOKENS:
            return await asyncio.to_thread(self._decode_aside, ids, skip_special_tokens)
        text: str = self.fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def _decode_aside(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str
        (text,) = self.fast.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token. A part of a character becomes a replacement character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, even if they are only part of a character."""
        token = self.fast.id_to_token(token_id) or ""
        if token_id not in self._special_ids and self._byte_level:
            table = byte_level_table()
            if all(char in table for char in token):
                return bytes(table[char] for char in token)
        if self._byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes.fromhex(byte[1])
        text: str = self.fast.decode([token_id], skip_special_tokens=False)
        return (" " * _num_stripped(token, text) + text).encode()


def load_tokenizer(
    folder: Path,
    *,
    use_generation_config: bool = False,
    tool_calls: str = "auto",
    reasoning_parser: str = "auto",
) -> TextTokenizer:
    """Reads the tokenizer, chat template and defaults of a model folder.

    Args:
        use_generation_config: take sampling defaults from generation_config.json.
        tool_calls, reasoning_parser: the model's formats of calls and thinking, as in the config;
            `auto` detects them in the chat template.

    Raises:
        CheckpointError: tokenizer.json is missing or a file is malformed.
        ConfigError: `tool_calls` or `reasoning_parser` names no family.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; model.path must be a folder with a tokenizer")
    settings = read_json_if_any(folder / SETTINGS_FILE)
    has_config = (folder / "config.json").is_file()
    max_model_len = load_model_config(folder).max_position_embeddings if has_config else 0
    generation = (
        read_json_if_any(folder / "generation_config.json") if use_generation_config else {}
    )
    source = read_chat_template(folder)
    return TextTokenizer(
        _fast_tokenizer(path),
        ChatTemplate(
            source,
            _special_tokens(settings),
            family_named(tool_calls, source),
            reasoning_named(reasoning_parser, source),
        ),
        max_model_len=max_model_len,
        sampling_defaults={
            name: generation[name]
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            if generation.get(name) is not None
        },
        info=_told(settings, source),
    )


def _told(settings: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The tokenizer's settings that clients may see."""
    told = {name: settings[name] for name in TOLD_SETTINGS if name in settings}
    return {**told, **_special_tokens(settings), "chat_template": template or None}


def _fast_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        fast = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions for malformed files
        raise CheckpointError(f"{path} is no tokenizer: {error}") from error
    # These settings are for training. This gateway refuses long prompts and pads none.
    fast.no_truncation()
    fast.no_padding()
    return fast


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


_SPACE = "\u2581"
"""The character for a space in SentencePiece's tokens."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""The form of a byte token in SentencePiece's vocabularies."""


def _num_stripped(token: str, text: str) -> int:
    """Number of leading spaces that the decoder strips, as at the start of a text."""
    if text.startswith(_SPACE):  # a literal character here
        return 0
    marked = len(token) - len(token.lstrip(_SPACE))
    return max(marked - (len(text) - len(text.lstrip(" "))), 0)


@lru_cache(maxsize=1)
def byte_level_table() -> dict[str, int]:
    """The characters that represent bytes in byte-level BPE vocabularies (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}
