"""The linear decision about endless schemas against a naive one, and against the compiler."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kvmesh.engine.endless_schema import endless_schema

NAMES = ("a", "b")
KINDS = ("object", "array", "other")
TYPES = ("object", "array", "null")

leaves = st.sampled_from(
    [{"$ref": "#"}, *({"$ref": f"#/$defs/{name}"} for name in NAMES), {"type": "null"}, {}]
)


def _with_children(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    few = st.lists(children, min_size=1, max_size=2)
    own = {
        "type": st.sampled_from(TYPES) | st.just(["object", "null"]),
        "properties": st.dictionaries(st.sampled_from(NAMES), children, max_size=2),
        "required": st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
        "additionalProperties": st.booleans() | children,
        "minProperties": st.integers(0, 1),
        "minItems": st.integers(0, 2),
        "prefixItems": few,
        "items": children,
        "allOf": few,
        "anyOf": few,
    }
    typical = st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.fixed_dictionaries({"a": children}),
            "required": st.just(["a"]),
        }
    )
    return typical | st.fixed_dictionaries({}, optional=own)


schemas = st.recursive(leaves, _with_children, max_leaves=6)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    root = draw(schemas)
    defs = {name: draw(schemas) for name in NAMES}
    found: dict[str, Any] = json.loads(json.dumps({**root, "$defs": defs}))
    return found


class Naive:
    """Whether there is a value, by trying ever deeper ones."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.known: dict[tuple[int, str, int], bool] = {}

    def decide(self) -> bool:
        deepest = json.dumps(self.document).count("{") * len(KINDS)
        return self.any(self.document, deepest)

    def any(self, schema: Any, depth: int) -> bool:
        return any(self.of_kind(schema, kind, depth) for kind in KINDS)

    def of_kind(self, schema: Any, kind: str, depth: int) -> bool:
        if isinstance(schema, bool):
            return schema
        key = (id(schema), kind, depth)
        if key not in self.known:
            self.known[key] = depth > 0 and self.look(schema, kind, depth - 1)
        return self.known[key]

    def look(self, schema: dict[str, Any], kind: str, depth: int) -> bool:
        types = schema.get("type", list(TYPES))
        if {"other": "null"}.get(kind, kind) not in types:
            return False
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            target = self.document if name == "#" else self.document["$defs"][name]
            if not self.of_kind(target, kind, depth):
                return False
        if not all(self.of_kind(part, kind, depth) for part in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(
            self.of_kind(part, kind, depth) for part in schema["anyOf"]
        ):
            return False
        if kind == "array":
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            slots = [*first, *itertools.repeat(rest, 2)][: schema.get("minItems", 0)]
            return all(self.any(slot, depth) for slot in slots)
        if kind == "object":
            named, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
            slots = [named.get(name, rest) for name in schema.get("required", ())]
            choices = [*named.values(), rest]
            enough = not schema.get("minProperties") or any(self.any(c, depth) for c in choices)
            return enough and all(self.any(slot, depth) for slot in slots)
        return True


@given(documents())
def test_the_decision_is_the_naive_one(document: dict[str, Any]) -> None:
    assert (endless_schema(document) == "") == Naive(document).decide()


def _values(depth: int) -> list[Any]:
    """All small values of some depth."""
    found: list[Any] = [None, [], {}]
    if depth:
        inner = _values(depth - 1)
        found += [[each] for each in inner] + [{name: each} for each in inner for name in NAMES]
        found += [[None, each] for each in inner] + [{"a": each, "b": None} for each in inner]
    return found


@cache
def _texts() -> list[bytes]:
    return [json.dumps(value, separators=(",", ":")).encode() for value in _values(2)]


@given(documents())
def test_no_text_is_accepted_for_an_endless_schema(document: dict[str, Any]) -> None:
    if not endless_schema(document):
        return
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(document))
    if LLMatcher.validate_grammar(grammar):
        return  # the compiler does not know it, or finds the cycle itself
    for text in _texts():
        matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
        assert matcher.try_consume_tokens(list(text)) < len(text) or not matcher.is_accepting()
