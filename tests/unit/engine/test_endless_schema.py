"""Schemas that no finite text satisfies are told with the place where they refer to themselves."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.endless_schema import endless_problem, endless_schema
from kvmesh.engine.grammar import structure_problem

Schema = dict[str, Any]
ROOT = {"$ref": "#"}
NULL = {"type": "null"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


def holds(*required: str, **properties: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def node(**more: Any) -> Schema:
    """A list's node that must have a next one."""
    return {**holds("next", next={"$ref": "#/$defs/node"}), **more}


def array(least: int, items: Any, **more: Any) -> Schema:
    return {"type": "array", "minItems": least, "items": items, **more}


ENDLESS = {
    "itself": (ROOT, "# leads back to #"),
    "a required property": (holds("a", a=ROOT), "#/properties/a leads back to #"),
    "a name with a slash": (holds("a/b~", **{"a/b~": ROOT}), "#/properties/a~1b~0 leads back to #"),
    "a long name": (holds("a" * 999, **{"a" * 999: ROOT}), "aaa... leads back to #"),
    "definitions": (
        {"$defs": {"node": node()}, **holds("x", x={"$ref": "#/$defs/node"})},
        "#/$defs/node/properties/next leads back to #/$defs/node",
    ),
    "definitions in a ring": (
        {
            "$defs": {
                "x": holds("y", y={"$ref": "#/$defs/y"}),
                "y": holds("x", x={"$ref": "#/$defs/x"}),
            },
            "$ref": "#/$defs/x",
        },
        "#/$defs/y/properties/x leads back to #/$defs/x",
    ),
    "a part of all": (
        {"type": "object", "allOf": [holds("a", a=ROOT)]},
        "#/allOf/0/properties/a leads back to #",
    ),
    "each of any": (
        {"anyOf": [holds("a", a=ROOT), array(1, ROOT)]},
        "#/anyOf/0/properties/a leads back to #",
    ),
    "each of one": ({"oneOf": [holds("a", a=ROOT)]}, "#/oneOf/0/properties/a leads back to #"),
    "items": (array(1, ROOT), "#/items leads back to #"),
    "the second item": (
        array(2, ROOT, prefixItems=[NULL]),
        "#/items leads back to #",
    ),
    "a first item": (array(1, NULL, prefixItems=[ROOT]), "#/prefixItems/0 leads back to #"),
    "a first item, as it was written": (array(1, [ROOT]), "#/items/0 leads back to #"),
    "items after the first ones": (
        array(2, [NULL], additionalItems=ROOT),
        "#/additionalItems leads back to #",
    ),
    "items where first ones are not known": (
        {**DRAFT_7, **array(1, ROOT, prefixItems=[NULL])},
        "#/items leads back to #",
    ),
    "a required name without a schema": (
        {"type": "object", "required": ["a"], "additionalProperties": ROOT},
        "#/additionalProperties leads back to #",
    ),
    "any property": (
        {"type": "object", "minProperties": 1, "additionalProperties": ROOT},
        "#/additionalProperties leads back to #",
    ),
    "values of the wrong kind": (
        {"type": ["object", "null"], "enum": [{"a": 1}], "allOf": [holds("a", a=ROOT)]},
        "#/allOf/0/properties/a leads back to #",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_schemas_are_told_with_their_path(name: str) -> None:
    schema, where = ENDLESS[name]
    problem = endless_schema(json.loads(json.dumps(schema)))
    assert problem.startswith("no finite text satisfies it: #")
    assert problem.endswith(where)


def test_they_are_told_before_a_worker_compiles_them() -> None:
    text = json.dumps(holds("a", a=ROOT))
    for structure in (
        Structure(StructureKind.JSON_SCHEMA, text),
        Structure(StructureKind.LARK, f"start: %json {text}"),
    ):
        assert structure_problem(structure).endswith("#/properties/a leads back to #")


FINITE = {
    "true": True,
    "an optional property": holds(a=ROOT),
    "a property that may be null": holds("a", a={"anyOf": [ROOT, NULL]}),
    "values of other kinds": {"properties": {"a": ROOT}, "required": ["a"]},
    "an empty list": array(0, ROOT),
    "null instead of a list": {**array(1, ROOT), "type": ["array", "null"]},
    "a first item": array(1, ROOT, prefixItems=[NULL]),
    "first items that are not known": {**DRAFT_7, **array(1, NULL, prefixItems=[ROOT])},
    "a node that is the last": {"$defs": {"node": {"anyOf": [node(), NULL]}}, **node()},
    "one of several properties": {
        "type": "object",
        "minProperties": 1,
        "properties": {"a": NULL},
        "additionalProperties": ROOT,
    },
    "a name that a pattern may match": {
        "type": "object",
        "required": ["ab"],
        "patternProperties": {"^a": NULL},
        "additionalProperties": ROOT,
    },
    "a reference to a part with an id": {"$id": "x", **holds("a", a={"$id": "y", **holds(b=ROOT)})},
    "a reference to elsewhere": holds("a", a={"$ref": "http://localhost/schema"}),
    "what is no schema": {"type": 3, "required": 4, "properties": [], "allOf": {}, "$ref": 7},
}


@pytest.mark.parametrize("name", FINITE)
def test_schemas_with_finite_values_pass(name: str) -> None:
    assert endless_schema(FINITE[name]) == ""


def test_a_schema_without_a_cycle_allows_nothing() -> None:
    assert endless_schema(holds("a", a=False)) == "no text satisfies it"


def test_what_is_no_schema_is_left_to_the_compiler() -> None:
    for kind, text in (
        (StructureKind.JSON_SCHEMA, "{"),
        (StructureKind.JSON_SCHEMA, "[" * 100_000),
        (StructureKind.REGEX, "a"),
    ):
        assert endless_problem(Structure(kind, text)) == ""


def _ring(size: int) -> Schema:
    defs = {
        f"d{n}": {
            "anyOf": [
                holds("a", "b", a={"$ref": f"#/$defs/d{(n + 1) % size}"}, b=NULL),
                array(2, {"$ref": f"#/$defs/d{(n * 7) % size}"}),
            ]
        }
        for n in range(size)
    }
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def test_time_grows_with_the_size_only() -> None:
    def seconds(size: int) -> float:
        schema = _ring(size)
        begin = time.process_time()
        assert "leads back to" in endless_schema(schema)
        return time.process_time() - begin

    small = min(seconds(250) for _ in range(5))
    assert min(seconds(4000) for _ in range(3)) < 100 * small, "squared it would be 256 times"
