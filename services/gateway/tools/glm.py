"""Tool calls as pairs of tagged keys and values: GLM, Ling.

Pure. Tests: tests/unit/gateway/tools/test_parsers.py.
"""

from __future__ import annotations

import json

from services.gateway.tools.held_text import held_back
from services.gateway.tools.marked import SteppedCalls
from services.gateway.tools.scanner import CallArguments, CallStart, Piece
from services.gateway.tools.xml import PlainValue, Schemas, is_text_only, types_of

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(SteppedCalls):
    """Reads `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`.

    Args:
        schemas: JSON schemas of the tools' parameters.
    """

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(_CALL)
        self._schemas = schemas
        self._name = ""
        self._num_written = 0
        self._value: PlainValue | None = None

    def _step(self) -> list[Piece] | None:
        if self._value is not None:
            return self._read_value(self._value)
        ends = [(at, mark) for mark in (_KEY, _CALL_END) if (at := self._held.find(mark)) >= 0]
        if not ends:
            return None
        at, mark = min(ends)
        if not self._name:
            self._name = self._held[:at].strip()
            self._held = self._held[at:]
            return [CallStart(self._name)] if self._name else self._close(mark)
        if mark == _CALL_END:
            return self._close(self._held[: at + len(mark)])
        key, has_value, rest = self._held[at + len(mark) :].partition(_VALUE)
        if not has_value:
            return None
        self._held = rest
        return self._open_value(key.partition(_KEY_END)[0].strip())

    def _open_value(self, key: str) -> list[Piece]:
        lead = ", " if self._num_written else "{"
        self._num_written += 1
        self._value = PlainValue(is_text_only(types_of(self._schemas, self._name).get(key)))
        return [CallArguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")]

    def _read_value(self, value: PlainValue) -> list[Piece] | None:
        raw, is_complete, rest = self._held.partition(_VALUE_END)
        if is_complete:
            self._held, self._value = rest, None
            return [CallArguments(value.last(raw))]
        sure = len(raw) - held_back(raw, _VALUE_END)
        self._held = raw[sure:]
        written = value.more(raw[:sure])
        return [CallArguments(written)] if written else None

    def _close(self, read: str) -> list[Piece]:
        self._held = self._held[len(read) :]
        pieces: list[Piece] = []
        if self._name:
            pieces.append(CallArguments("}" if self._num_written else "{}"))
        self._name, self._num_written = "", 0
        self._leave()
        return pieces
