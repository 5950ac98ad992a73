"""Parsers of tool calls in a model's text, one per family of chat templates.

A parser takes text in pieces of any size and returns the decided part at once, so streams and whole
answers use the same code. Pure. Tests: tests/unit/gateway/tools/test_parsers.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Protocol

from kvmesh.core.errors import ConfigError
from services.gateway.tools.glm import GlmParser
from services.gateway.tools.harmony import HarmonyCalls
from services.gateway.tools.json_forms import HermesParser, LlamaParser, MistralParser
from services.gateway.tools.scanner import Piece
from services.gateway.tools.sections import SectionMarks, SectionParser, TaggedListParser
from services.gateway.tools.xml import QwenXmlParser, Schemas


class ToolFamily(enum.Enum):
    """A format of tool calls; the values are those of vLLM's `--tool-call-parser`."""

    HERMES = "hermes"
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`: Hermes, Qwen, Ling."""
    LLAMA3_JSON = "llama3_json"
    """The whole answer is `{"name": …, "parameters": …}`: Llama 3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": …, "arguments": …}]`, or `[TOOL_CALLS]name{…}`: Mistral."""
    QWEN3_CODER = "qwen3_coder"
    """`<tool_call><function=name><parameter=key>value</parameter>…`: Qwen3-Coder, Qwen3.5."""
    DEEPSEEK_V3 = "deepseek_v3"
    """`<｜tool▁calls▁begin｜>…`, with a name and an object for each call: DeepSeek V3, R1, V3.1."""
    KIMI_K2 = "kimi_k2"
    """`<|tool_calls_section_begin|>…functions.name:0…{…}`: Kimi."""
    MINIMAX = "minimax"
    """`<tool_calls>`, a line for each call, `</tool_calls>`: MiniMax."""
    GLM45 = "glm45"
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…`: Ling, GLM."""
    OPENAI = "openai"
    """A message `to=functions.name` in the channel commentary: gpt-oss."""

    @property
    def has_special_marks(self) -> bool:
        """Whether the marks of calls may be special tokens, which the text must keep."""
        return self not in _PLAIN_MARKS


_PLAIN_MARKS = (
    *(ToolFamily.HERMES, ToolFamily.QWEN3_CODER),
    *(ToolFamily.GLM45, ToolFamily.MINIMAX),
)

_SIGNS: tuple[tuple[tuple[str, ...], ToolFamily], ...] = (
    # Some formats use Hermes' mark around their own.
    (("<tool_call>", "<arg_key>"), ToolFamily.GLM45),
    (("<tool_call>", "<function="), ToolFamily.QWEN3_CODER),
    (("<tool_call>",), ToolFamily.HERMES),
    (("<｜tool▁calls▁begin｜>",), ToolFamily.DEEPSEEK_V3),
    (("<|tool_calls_section_begin|>",), ToolFamily.KIMI_K2),
    (("<tool_calls>",), ToolFamily.MINIMAX),
    (("[TOOL_CALLS]",), ToolFamily.MISTRAL),
    (("<|channel|>commentary",), ToolFamily.OPENAI),
    (("<|python_tag|>",), ToolFamily.LLAMA3_JSON),
    (('"parameters": dictionary',), ToolFamily.LLAMA3_JSON),
)


def family_of_template(source: str) -> ToolFamily | None:
    """The family of a chat template; None if it has no tools."""
    found = (family for signs, family in _SIGNS if all(sign in source for sign in signs))
    return next(found, None)


def family_named(word: str, source: str) -> ToolFamily | None:
    """The family that a config names; `auto` detects it in the chat template.

    Raises:
        ConfigError: the word names no family.
    """
    if word == "auto":
        return family_of_template(source)
    if word == "none":
        return None
    words = {family.value: family for family in ToolFamily}
    if word not in words:
        allowed = ", ".join(["auto", *words, "none"])
        raise ConfigError(f"model.tool_calls must be one of {allowed}, got {word!r}")
    return words[word]


class ToolParser(Protocol):
    """Reads the text of one generation."""

    def push(self, text: str) -> list[Piece]:
        """Adds text; returns the pieces that are decided."""
        ...

    def finish(self) -> list[Piece]:
        """Returns the rest, at the end of the text."""
        ...


def parser_for(family: ToolFamily, schemas: Schemas) -> ToolParser:
    """Returns a parser for free text with calls in it.

    Args:
        schemas: JSON schemas of the tools' parameters.
    """
    return _PARSERS[family](schemas)


_PARSERS: Mapping[ToolFamily, Callable[[Schemas], ToolParser]] = {
    ToolFamily.HERMES: lambda _: HermesParser(),
    ToolFamily.LLAMA3_JSON: LlamaParser,
    ToolFamily.MISTRAL: lambda _: MistralParser(),
    ToolFamily.QWEN3_CODER: QwenXmlParser,
    ToolFamily.DEEPSEEK_V3: lambda _: SectionParser(SectionMarks.DEEPSEEK),
    ToolFamily.KIMI_K2: lambda _: SectionParser(SectionMarks.KIMI),
    ToolFamily.MINIMAX: lambda _: TaggedListParser(),
    ToolFamily.GLM45: GlmParser,
    ToolFamily.OPENAI: lambda _: HarmonyCalls(),
}
