"""Tool calls as tags with plain text between them: Qwen3-Coder, Qwen3.5.

Values have no quotes, so the tool's schema tells their types. Strings are passed on as they arrive,
other values when they are complete. Pure. Tests: tests/unit/gateway/tools/test_parsers.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from services.gateway.tools.held_text import held_back
from services.gateway.tools.marked import SteppedCalls
from services.gateway.tools.scanner import CallArguments, CallStart, Piece

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_WORDS = {"True": True, "False": False, "None": None}


class QwenXmlParser(SteppedCalls):
    """Reads `<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`.

    Args:
        schemas: JSON schemas of the tools' parameters.
    """

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(_CALL)
        self._schemas = schemas
        self._types: Mapping[str, Any] = {}
        self._num_written = 0  # number of parameters of the current call
        self._is_open = False  # inside a call without an end mark so far
        self._value: PlainValue | None = None
        self._has_begun = False  # the line break before the value was read

    def _step(self) -> list[Piece] | None:
        if self._value is not None:
            return self._read_value(self._value)
        held = self._held.lstrip()
        for mark, read in (
            (_FUNCTION, self._open_function),
            (_PARAMETER, self._open_parameter),
        ):
            if held.startswith(mark):
                name, is_complete, rest = held.removeprefix(mark).partition(">")
                if not is_complete:
                    return None
                self._held = rest
                return read(name.strip())
        if held.startswith(_FUNCTION_END):
            self._held = held.removeprefix(_FUNCTION_END)
            return self._close()
        if held.startswith(_CALL_END):
            self._held = held.removeprefix(_CALL_END).lstrip()
            self._leave()
            return self._close()
        marks = (_FUNCTION, _PARAMETER, _FUNCTION_END, _CALL_END)
        if not held or any(mark.startswith(held) for mark in marks):
            return None
        # No mark begins here, so this is not part of a call.
        at = held.find("<", 1)
        self._held = held[at:] if at >= 0 else ""
        return []

    def _open_function(self, name: str) -> list[Piece]:
        pieces = self._close()
        self._types = types_of(self._schemas, name)
        self._num_written, self._is_open = 0, True
        return [*pieces, CallStart(name)]

    def _open_parameter(self, name: str) -> list[Piece]:
        if not self._is_open:
            return []
        lead = ", " if self._num_written else "{"
        self._num_written += 1
        self._has_begun = False
        self._value = PlainValue(is_text_only(self._types.get(name)))
        return [CallArguments(f"{lead}{json.dumps(name, ensure_ascii=False)}: ")]

    def _read_value(self, value: PlainValue) -> list[Piece] | None:
        raw, is_complete, rest = self._held.partition(_PARAMETER_END)
        if not self._has_begun:  # the value has lines of its own
            self._has_begun = bool(raw) or bool(is_complete)
            raw = raw.removeprefix("\n")
        if is_complete:
            self._held, self._value = rest, None
            return [CallArguments(value.last(raw.removesuffix("\n")))]
        sure = len(raw) - held_back(raw, _PARAMETER_END)
        sure = len(raw[:sure].removesuffix("\n"))
        self._held = raw[sure:]
        written = value.more(raw[:sure])
        return [CallArguments(written)] if written else None

    def _close(self) -> list[Piece]:
        if not self._is_open:
            return []
        self._is_open = False
        return [CallArguments("}" if self._num_written else "{}")]


class PlainValue:
    """Converts one value from plain text to JSON.

    Args:
        is_text: the value is a string even if it looks like another type.
    """

    def __init__(self, is_text: bool) -> None:
        self._is_text = is_text
        self._has_begun = False
        self._raw: list[str] = []

    def more(self, raw: str) -> str:
        """Adds a part; returns JSON that may be passed on."""
        if not raw:
            return ""
        if not self._is_text:
            self._raw.append(raw)
            return ""
        lead = "" if self._has_begun else '"'
        self._has_begun = True
        return lead + _escaped(raw)

    def last(self, raw: str) -> str:
        """Adds the last part; returns the rest of the JSON."""
        if not self._is_text:
            return _as_json("".join(self._raw) + raw)
        lead = "" if self._has_begun else '"'
        return lead + _escaped(raw) + '"'


def types_of(schemas: Schemas, name: str) -> Mapping[str, Any]:
    """The schemas of a function's parameters, by name; empty if the tool declares none."""
    types = schemas.get(name, {}).get("properties")
    return types if isinstance(types, Mapping) else {}


def is_text_only(schema: Any) -> bool:
    """Whether a value is always a string. True also if the schema does not tell."""
    if not isinstance(schema, Mapping):
        return True
    kind = schema.get("type")
    if isinstance(kind, str):
        return kind == "string"
    if isinstance(kind, list):
        return kind == ["string"]
    if isinstance(schema.get("enum"), list):
        return all(isinstance(each, str) for each in schema["enum"])
    return not any(key in schema for key in ("anyOf", "oneOf", "allOf", "$ref", "const"))


def _as_json(raw: str) -> str:
    """Converts a value to JSON; to a string if it is not valid JSON."""
    text = raw.strip()
    if text in _WORDS:
        return json.dumps(_WORDS[text])
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not valid text
    except (ValueError, RecursionError):
        return json.dumps(raw, ensure_ascii=False)
    return text


def _refuse_constant(word: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python's parser accepts and JSON lacks."""
    raise ValueError(word)


def _escaped(raw: str) -> str:
    return json.dumps(raw, ensure_ascii=False)[1:-1]
