"""Patterns that hold for one text: what would take minutes to compile is told before."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.grammar import structure_problem
from kvmesh.engine.pattern_cost import MAX_MEETING, MAX_NAME_PATTERNS, _may_fit, pattern_problem

Schema = dict[str, Any]
MANY = 4 * MAX_MEETING  # more than would ever be compiled


def _text(number: int) -> Schema:
    return {"type": "string", "pattern": f"a{number}"}


def _all(make: Callable[[int], Schema]) -> Schema:
    return {"allOf": [make(number) for number in range(MANY)]}


def _nested(depth: int) -> Schema:
    return {**_text(depth), "allOf": [_nested(depth - 1)]} if depth else _text(0)


def _defined(ref: Callable[[int], str], **extra: Callable[[int], str]) -> Schema:
    more = [{name: value(number) for name, value in extra.items()} for number in range(MANY)]
    defs = {f"p{number}": {**_text(number), **more[number]} for number in range(MANY)}
    return {"$defs": defs, "allOf": [{"$ref": ref(number)} for number in range(MANY)]}


COSTLY = {
    "all of": _all(_text),
    "without a type": _all(lambda number: {"pattern": f"a{number}"}),
    "nested": _nested(MANY),
    "at one name": _all(lambda number: {"properties": {"x": _text(number)}}),
    "at any name": _all(lambda number: {"additionalProperties": _text(number)}),
    "in a list": _all(lambda number: {"type": "array", "items": _text(number)}),
    "in the rest of a list": _all(lambda number: {"items": [], "additionalItems": _text(number)}),
    "at a name and a pattern of names": {
        "properties": {"x1": {"allOf": [_text(n) for n in range(MAX_MEETING)]}},
        "patternProperties": {
            "^z": {},
            "^x[0-9]": {"allOf": [_text(MANY + n) for n in range(MAX_MEETING)]},
        },
    },
    "by references from one to the next": {
        "$defs": {
            f"p{n}": {**_text(n), "allOf": [{"$ref": f"#/$defs/p{n + 1}"}]} for n in range(900)
        },
        "$ref": "#/$defs/p0",
    },
    "by an index of no list": {**_all(_text), "items": {"$ref": "#/allOf/" + "1" * 5000}},
    "at a place of a list": _all(lambda number: {"prefixItems": [_text(number)]}),
    "by references": _defined(lambda number: f"#/$defs/p{number}"),
    "by anchors": _defined(lambda number: f"#q{number}", **{"$anchor": lambda n: f"q{n}"}),
    "by identifiers": _defined(lambda number: f"q{number}", **{"$id": lambda n: f"q{n}"}),
    "by a reference within a part with an identifier": {
        "$defs": {
            "p": {},
            "part": {
                "$id": "part",
                "$defs": {"p": _all(_text)},
                "properties": {"x": {"$ref": "#/$defs/p"}},
            },
        },
        "$ref": "#/$defs/part",
    },
    "by an escaped reference": {
        "$defs": {"p%25": {}, "p%": _all(_text)},
        "$ref": "#/$defs/p%25",
    },
    "by references in a ring": {
        "$defs": {
            f"p{n}": {
                **_text(n),
                "allOf": [{"$ref": f"#/$defs/p{(n + 1) % MANY}"}],
                "properties": {"x": {"$ref": f"#/$defs/p{n - 1}"}} if n else {},
            }
            for n in range(MANY)
        },
        "$ref": "#/$defs/p7",
    },
    "alternatives": _all(lambda number: {"anyOf": [_text(number), _text(number + MANY)]}),
    "names": {"patternProperties": {f"^a{n}$": {} for n in range(MAX_NAME_PATTERNS + 1)}},
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_patterns_are_told_before_anything_is_compiled(name: str) -> None:
    text = json.dumps(COSTLY[name])
    for structure in (
        Structure(StructureKind.JSON_SCHEMA, text),
        Structure(StructureKind.LARK, f"start: %json {text}"),
    ):
        problem = structure_problem(structure)
        assert problem.startswith("pattern")
        assert "at most" in problem or "too deeply" in problem


def _lists(depth: int) -> Schema:
    """Would never be counted if each list were looked into twice."""
    return {"type": "array", "items": _lists(depth - 1)} if depth else _text(MANY)


USUAL = {
    "each its own place": {"properties": {f"k{n}": _text(n) for n in range(MANY)}},
    "one of many": {"anyOf": [_text(number) for number in range(MANY)]},
    "a pattern that is said again": {
        "$defs": {"p": _text(0), **{f"q{n}": _text(n) for n in range(MANY)}},
        "properties": {"x": {"allOf": [{"$ref": "#/$defs/p"}] * 2}},
    },
    "a tree": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "[a-z]+", "format": "hostname"},
            "children": {"type": "array", "items": {"$ref": "#"}},
            **{f"k{n}": _text(n) for n in range(MANY)},
        },
    },
    "names": {"patternProperties": {f"^a{n}$": {} for n in range(20)}},
    "names that nobody knows": {
        "properties": {f"k{n}": _text(n) for n in range(MANY)},
        "patternProperties": {"^x-": {"$ref": "#"}},
    },
    "lists of lists": {
        "properties": {f"k{n}": _text(n) for n in range(MANY)} | {"deep": _lists(60)},
    },
}


@pytest.mark.parametrize("name", USUAL)
def test_patterns_that_do_not_meet_may_be_many(name: str) -> None:
    assert pattern_problem(Structure(StructureKind.JSON_SCHEMA, json.dumps(USUAL[name]))) == ""


def test_what_is_no_schema_is_left_to_the_compiler() -> None:
    for kind, text in (
        (StructureKind.JSON_SCHEMA, "{"),
        (StructureKind.JSON_SCHEMA, "[" * 100_000),
        (StructureKind.JSON_SCHEMA, json.dumps({"allOf": 3, "$ref": 7, "pattern": []})),
        (StructureKind.JSON_SCHEMA, '{"allOf": [{"$ref": "#"}, {"$ref": "#/no/where"}]}'),
        (StructureKind.REGEX, "a" * MANY),
    ):
        assert pattern_problem(Structure(kind, text)) == ""


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("^x-", False),
        ("^ka", True),
        ("^kz*", True),
        ("^kz?a", True),
        ("^kz{0,2}", True),
        ("^kz+", False),
        ("^z|a", True),
        ("a$", True),
        ("^", True),
        ("^[xyz]", True),
    ],
)
def test_letters_that_a_pattern_begins_with_tell_which_names_it_fits(
    pattern: str, fits: bool
) -> None:
    assert _may_fit(pattern, ["ab", "ka"]) is fits


def test_the_limit_itself_is_compiled_in_no_time() -> None:
    schema = {"allOf": [_text(number) for number in range(MAX_MEETING)]}
    problem = structure_problem(Structure(StructureKind.JSON_SCHEMA, json.dumps(schema)))
    assert "at most" not in problem
