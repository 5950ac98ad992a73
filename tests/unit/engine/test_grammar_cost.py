from __future__ import annotations

import json
from typing import Any

import pytest

from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.grammar import structure_problem
from kvmesh.engine.grammar_cost import MAX_REMAINDERS, divisor_problem


def integer(divisor: object) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": divisor}


def schema(content: object) -> Structure:
    text = content if isinstance(content, str) else json.dumps(content)
    return Structure(StructureKind.JSON_SCHEMA, text)


def lark(text: str) -> Structure:
    return Structure(StructureKind.LARK, text)


LARGE = 9_999_991

FIELDS = {name: integer(divisor) for name, divisor in zip("abcd", (25, 60, 97, 991), strict=True)}

USUAL = [
    schema(integer(86_400)),
    schema(integer(10**9)),
    schema({"type": "number", "multipleOf": 0.01}),
    schema({"type": "number", "multipleOf": 1e-6}),
    schema({"properties": {name: integer(60) for name in "abcdefgh"}}),
    schema({"properties": {"a": integer(5), "b": integer(1024), "c": integer(12)}}),
    schema({"properties": FIELDS, "additionalProperties": False}),
    schema({"properties": {"multipleOf": {"type": "string"}}, "title": "multipleOf"}),
    lark(f'start: "multipleOf: {LARGE}"'),
    Structure(StructureKind.REGEX, "[0-9]+"),
]
COSTLY = [
    schema(integer(LARGE)),
    schema({"type": "number", "multipleOf": 99999.91}),
    schema(integer(3 * 10**5)),
    schema(f'{{"type": "integer", "multipleOf": {"9" * 5000}}}'),
    schema('{"type": "number", "multipleOf": 3e999999999999999999}'),
    schema('{"type": "number", "multipleOf": Infinity}'),
    schema('{"type": "number", "multipleOf": 3e-99999999999999999999}'),
    schema(f'{{"minimum": 1e-99999999999999999999, "multipleOf": {LARGE}}}'),
    schema(f' {{"multipleOf": {LARGE}, "multipleOf": 2}}'),
    schema({"anyOf": [integer(900 + n) for n in range(20)]}),
    schema({"properties": FIELDS, "additionalProperties": integer(7)}),
    schema({"properties": {**FIELDS, "e": {"anyOf": [integer(7), {"type": "null"}]}}}),
    schema({"properties": {name: integer(60_000 + n) for n, name in enumerate("ab")}}),
    lark("\n".join(f"{name}: %json {json.dumps(each)}" for name, each in FIELDS.items())),
    schema({"allOf": [{"$ref": "#/$defs/a"}, integer(997)], "$defs": {"a": integer(991)}}),
    lark(f'start: %json\n {{"type": "integer", "multiple\\u004ff": {LARGE}}}'),
    lark(f'start: %lark {{\nstart: %json {{"type": "integer", "multipleOf": {LARGE}}}\n}}'),
]


@pytest.mark.parametrize("structure", USUAL)
def test_usual_divisors_are_compiled(structure: Structure) -> None:
    assert divisor_problem(structure) == ""
    assert structure_problem(structure) == ""


@pytest.mark.parametrize("structure", COSTLY)
def test_costly_divisors_are_told_before_anything_is_built(structure: Structure) -> None:
    assert str(MAX_REMAINDERS) in divisor_problem(structure)
    assert structure_problem(structure) == divisor_problem(structure)


def test_what_is_no_json_is_left_to_the_compiler() -> None:
    deep = schema("[" * 100_000)
    assert divisor_problem(deep) == ""
    assert structure_problem(deep)
    assert divisor_problem(schema("{")) == ""
    huge = schema('{"type": "number", "maximum": 1e99999999999999999999}')
    assert divisor_problem(huge) == ""
    assert structure_problem(huge)
