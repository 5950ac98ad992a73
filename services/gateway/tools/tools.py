"""Tools of a chat call: the allowed ones, the structure of forced calls, and finding calls in text.

Pure. Tests: tests/unit/gateway/api/test_openai.py, tests/integration/test_gateway_api.py.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import Structure
from services.gateway.api.messages import NamedChoice, Tool
from services.gateway.api.schema import ChatBody
from services.gateway.api.structured import (
    JsonSchema,
    call_schema,
    check_length,
    json_schema,
    rebased,
)
from services.gateway.tools.json_forms import NamedParser, RequiredParser
from services.gateway.tools.parsers import ToolFamily, ToolParser, parser_for
from services.gateway.tools.scanner import CallStart, Content, Piece
from services.gateway.tools.xml import Schemas

_NO_PARAMETERS: JsonSchema = {"type": "object", "properties": {}}


class ToolMode(enum.Enum):
    """Whether the model or the caller decides about calls."""

    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a call uses its tools.

    Attributes:
        names: names of all tools.
        family: the model's format of calls, in mode AUTO.
        chosen: the function, in mode NAMED.
        schemas: JSON schemas of the tools' parameters, by name.
        parallel: more than one call is allowed.
    """

    mode: ToolMode
    names: tuple[str, ...]
    family: ToolFamily | None = None
    chosen: str = ""
    parallel: bool = True
    schemas: Schemas = field(default_factory=dict)

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the marks of calls are special tokens, which the text must keep."""
        return self.family is not None and self.family.has_special_marks

    def parser(self) -> ToolParser:
        """Returns a parser for one generation."""
        if self.mode is ToolMode.NAMED:
            return NamedParser(self.chosen)
        if self.mode is ToolMode.REQUIRED:
            return RequiredParser()
        assert self.family is not None, "checked by tool_use"
        return parser_for(self.family, self.schemas)


def tool_use(body: ChatBody, family: ToolFamily | None) -> ToolUse | None:
    """Returns a body's use of tools; None without tools.

    Args:
        family: family of the model's chat template.

    Raises:
        InvalidRequestError: names the field and what is allowed.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequestError(
                "tool_choice: without tools, allowed: none, auto", "tool_choice"
            )
        return None
    if choice == "none":
        return None
    names = tuple(tool.function.name for tool in tools)
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, NamedChoice):
        if choice.function.name not in names:
            allowed = ", ".join(names)
            raise InvalidRequestError(
                f"tool_choice: no tool {choice.function.name!r}; allowed: {allowed}", "tool_choice"
            )
        return ToolUse(ToolMode.NAMED, names, chosen=choice.function.name)
    if choice == "required":
        return ToolUse(ToolMode.REQUIRED, names, parallel=parallel)
    if family is None:
        raise InvalidRequestError(
            "tool_choice: this model's chat template has no format for calls; allowed: none, "
            "required, or a function by name",
            "tool_choice",
        )
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return ToolUse(ToolMode.AUTO, names, family, parallel=parallel, schemas=schemas)


def tool_structure(use: ToolUse, tools: Sequence[Tool]) -> Structure | None:
    """Returns the structure of text that consists of calls; None in mode AUTO.

    Raises:
        InvalidRequestError: the parameters are too long or nested too deep.
    """
    if use.mode is ToolMode.AUTO:
        return None
    if use.mode is ToolMode.NAMED:
        found = next(tool.function for tool in tools if tool.function.name == use.chosen)
        structure = json_schema(found.parameters or _NO_PARAMETERS)
    else:
        structure = json_schema(_calls_schema(tools, parallel=use.parallel))
    check_length(structure, "tools")
    return structure


def _calls_schema(tools: Sequence[Tool], *, parallel: bool) -> JsonSchema:
    """The schema of a list of calls. The parameters' schemas are definitions in it."""
    definitions: JsonSchema = {}
    calls: list[JsonSchema] = []
    for number, tool in enumerate(tools):
        key = f"tools.{number}"
        definitions[key] = rebased(tool.function.parameters or _NO_PARAMETERS, f"#/$defs/{key}")
        calls.append(call_schema(tool.function.name, {"$ref": f"#/$defs/{key}"}))
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if parallel else {**schema, "maxItems": 1}


class ToolReader:
    """Finds the calls of one choice and writes them as OpenAI's deltas.

    Args:
        label: makes the ids of calls unique over choices and requests.
    """

    def __init__(self, use: ToolUse, label: str) -> None:
        self._use = use
        self._parser = use.parser()
        self._label = label
        self._num_calls = 0
        self._num_told = 0

    @property
    def finish_word(self) -> str | None:
        """The finish reason that replaces "stop"; None keeps it."""
        return "tool_calls" if self._num_calls and self._use.mode is not ToolMode.NAMED else None

    def push(self, text: str, *, last: bool) -> dict[str, Any]:
        """Adds text. Returns the delta, which is empty while nothing is decided."""
        return self._delta(self.read(text, last=last))

    def read(self, text: str, *, last: bool) -> list[Piece]:
        """Adds text. Returns its pieces in order, without calls that are not allowed.

        Args:
            last: this is the end of the text.
        """
        pieces = self._parser.push(text)
        if last:
            pieces += self._parser.finish()
        kept: list[Piece] = []
        for piece in pieces:
            self._num_calls += isinstance(piece, CallStart)
            if isinstance(piece, Content) or self._num_calls <= 1 or self._use.parallel:
                kept.append(piece)
        return kept

    def _delta(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        content = ""
        calls: dict[int, dict[str, Any]] = {}
        for piece in pieces:
            if isinstance(piece, Content):
                content += piece.text
                continue
            self._num_told += isinstance(piece, CallStart)
            index = self._num_told - 1
            if isinstance(piece, CallStart):
                calls[index] = {
                    "index": index,
                    "id": piece.call_id or self.call_id(index),
                    "type": "function",
                    "function": {"name": piece.name, "arguments": ""},
                }
            else:
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def call_id(self, index: int) -> str:
        """The id of a call. The client repeats it with the call's result."""
        # Nine letters or digits: the strictest chat templates accept only such ids.
        return hashlib.blake2s(f"{self._label}/{index}".encode()).hexdigest()[:9]


def whole_message(reader: ToolReader, text: str) -> dict[str, Any]:
    """The message of a whole answer: content and calls."""
    delta = reader.push(text, last=True)
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content")}
    if "tool_calls" in delta:
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"}
            for call in delta["tool_calls"]
        ]
    elif message["content"] is None:
        message["content"] = ""
    return message
