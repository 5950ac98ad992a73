"""Finds JSON schemas that no finite text satisfies, because each value contains another one.

An example is an object whose required property refers to the object itself. The compiler accepts
such schemas, and the model then generates until its token limit.

A value is an object, an array or anything else. For each schema and each of these kinds there is a
gate: it opens when enough of its inputs are open, and an open gate means that a finite value of
this kind may exist. The gates that open one after the other are the least solution, found in time
linear in the number of references between schemas (W. Dowling and J. Gallier, "Linear-time
algorithms for testing the satisfiability of propositional Horn formulae", 1984). A schema whose
gates stay closed has no finite value.

Conditions that hold for one value together are checked one by one, so a schema that passes may
still have no value; one that does not pass has none. Pure. Tests:
tests/unit/engine/test_endless_schema.py, tests/property/test_endless_schemas.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.types import Structure
from kvmesh.engine.grammar_cost import schema_starts
from kvmesh.engine.schema_refs import References

_KINDS = ("object", "array", "other")
_MAX_PATH = 200
"""Maximum characters of a path in a message."""


def endless_problem(structure: Structure) -> str:
    """Returns why no finite text satisfies a structure's JSON schemas; empty if one may."""
    for start in schema_starts(structure):
        try:
            schema, _ = json.JSONDecoder().raw_decode(structure.text, start)
        except (ValueError, RecursionError):
            continue  # the compiler reports its error
        if problem := endless_schema(schema):
            return problem
    return ""


def endless_schema(schema: Any) -> str:
    """Returns why no finite value satisfies a schema; empty if one may."""
    gates = _Gates(schema)
    return "" if gates.is_open else gates.reason()


@dataclass(slots=True, eq=False)
class _Gate:
    """Whether a schema has a finite value, of one kind or of any.

    Attributes:
        kind: None for any.
        origin: the schema that contains this one, if it was not reached by a reference.
        step: the path of this schema from there, or the reference.
        conditions: of which all have to hold.
        num_closed: how many of them do not hold.
    """

    schema: Any
    kind: str | None
    origin: _Gate | None
    step: str
    conditions: list[_Condition] = field(default_factory=list)
    num_closed: int = 0

    @property
    def path(self) -> str:
        """The path of the schema from the document's root."""
        steps, gate = [self.step], self.origin
        while gate is not None:
            steps.append(gate.step)
            gate = gate.origin
        path = "".join(reversed(steps))
        return path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."


@dataclass(slots=True, eq=False)
class _Condition:
    """Holds when at least `needed` of some gates are open."""

    gate: _Gate
    needed: int
    inputs: list[_Gate]


class _Gates:
    """The gates of one document."""

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        draft = root.get("$schema") if isinstance(root, dict) else None
        is_older = isinstance(draft, str) and "2020-12" not in draft
        self._item_lists = ("items",) if is_older else ("items", "prefixItems")
        self._gates: dict[tuple[int, str | None], _Gate] = {}
        self._users: dict[_Gate, list[_Condition]] = {}
        self._open: set[_Gate] = set()
        self._unfilled: list[_Gate] = []
        self._root = self._gate(root, None, None, "#")
        while self._unfilled:
            self._fill(self._unfilled.pop())
        self._open_all()

    @property
    def is_open(self) -> bool:
        """Whether the document may have a finite value."""
        return self._root in self._open

    def reason(self) -> str:
        """Returns a cycle of closed gates, in words."""
        path = {self._root: iter(self._closed_inputs(self._root))}
        seen = {self._root}
        while path:
            gate, inputs = next(reversed(path.items()))
            for each in inputs:
                if each in path:
                    return f"no finite text satisfies it: {gate.path} leads back to {each.path}"
                if each not in seen:
                    seen.add(each)
                    path[each] = iter(self._closed_inputs(each))
                    break
            else:
                path.popitem()
        return "no text satisfies it"

    def _closed_inputs(self, gate: _Gate) -> list[_Gate]:
        """Returns the gates that a closed gate waits for."""
        for condition in gate.conditions:
            closed = [each for each in condition.inputs if each not in self._open]
            if len(condition.inputs) - len(closed) < condition.needed:
                return closed
        return []

    def _gate(self, schema: Any, kind: str | None, origin: _Gate | None, step: str) -> _Gate:
        found = self._gates.get((id(schema), kind))
        if found is None:
            found = self._gates[id(schema), kind] = _Gate(schema, kind, origin, step)
            self._users[found] = []
            self._unfilled.append(found)
        return found

    def _fill(self, gate: _Gate) -> None:
        """Adds a gate's conditions."""
        for needed, inputs in self._conditions(gate):
            condition = _Condition(gate, needed, inputs)
            gate.conditions.append(condition)
            gate.num_closed += needed > 0
            for each in inputs:
                self._users[each].append(condition)
        if not gate.num_closed:
            self._open.add(gate)

    def _open_all(self) -> None:
        """Opens all gates that open because others are open."""
        waiting = list(self._open)
        left: dict[_Condition, int] = {}
        while waiting:
            for condition in self._users[waiting.pop()]:
                needed = left[condition] = left.get(condition, condition.needed) - 1
                if needed:
                    continue
                gate = condition.gate
                gate.num_closed -= 1
                if not gate.num_closed:
                    self._open.add(gate)
                    waiting.append(gate)

    # -- What a schema needs ----------------------------------------------------------------------

    def _conditions(self, gate: _Gate) -> Iterator[tuple[int, list[_Gate]]]:
        schema, kind = gate.schema, gate.kind
        if kind is None:
            yield 1, [self._gate(schema, each, gate, "") for each in _KINDS]
        elif not _allows(schema, kind):
            yield 1, []
        elif isinstance(schema, dict):
            yield from self._of_same_value(gate, kind)
            if kind == "object":
                yield from self._of_properties(gate)
            elif kind == "array":
                yield from self._of_items(gate)

    def _of_same_value(self, gate: _Gate, kind: str) -> Iterator[tuple[int, list[_Gate]]]:
        """The conditions of schemas that the value itself has to satisfy, too."""
        schema = gate.schema
        if "$ref" in schema:
            found, target = self._references.target(schema["$ref"])
            if found:
                yield 1, [self._gate(target, kind, None, schema["$ref"])]
        for name in ("allOf", "anyOf", "oneOf"):
            parts = schema.get(name)
            if isinstance(parts, list):
                inputs = [
                    self._gate(part, kind, gate, f"/{name}/{number}")
                    for number, part in enumerate(parts)
                ]
                yield len(inputs) if name == "allOf" else 1, inputs

    def _of_properties(self, gate: _Gate) -> Iterator[tuple[int, list[_Gate]]]:
        schema = gate.schema
        properties, patterns = _named(schema, "properties"), _named(schema, "patternProperties")
        others = schema.get("additionalProperties", True)
        required = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
        needed = [
            self._gate(properties[name], None, gate, _step("properties", name))
            for name in required
            if name in properties
        ]
        if len(needed) < len(required) and not patterns:
            needed.append(self._gate(others, None, gate, "/additionalProperties"))
        yield len(needed), needed
        if _least(schema, "minProperties"):
            named = [(_step("properties", name), part) for name, part in properties.items()]
            named += [(_step("patternProperties", name), part) for name, part in patterns.items()]
            named.append(("/additionalProperties", others))
            yield 1, [self._gate(part, None, gate, step) for step, part in named]

    def _of_items(self, gate: _Gate) -> Iterator[tuple[int, list[_Gate]]]:
        schema = gate.schema
        least = _least(schema, "minItems")
        name = "items" if isinstance(schema.get("items"), list) else "prefixItems"
        first = _listed(schema.get(name))[:least] if name in self._item_lists else []
        needed = [
            self._gate(part, None, gate, f"/{name}/{number}") for number, part in enumerate(first)
        ]
        if len(first) < least:
            rest = "additionalItems" if name == "items" else "items"
            needed.append(self._gate(schema.get(rest, True), None, gate, f"/{rest}"))
        yield len(needed), needed


def _allows(schema: Any, kind: str) -> bool:
    """Returns whether a schema itself allows values of a kind."""
    if not isinstance(schema, dict):
        return schema is not False
    types, values = schema.get("type"), schema.get("enum")
    if types is not None and kind not in map(_kind_of_type, _listed(types)):
        return False
    if isinstance(values, list) and kind not in map(_kind_of, values):
        return False
    return "const" not in schema or kind == _kind_of(schema["const"])


def _kind_of_type(name: Any) -> str:
    return name if name in ("object", "array") else "other"


def _kind_of(value: Any) -> str:
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else "other"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _named(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}


def _least(schema: dict[str, Any], name: str) -> int:
    value = schema.get(name)
    return max(value, 0) if isinstance(value, int) else 0


def _step(name: str, key: str) -> str:
    return f"/{name}/" + key.replace("~", "~0").replace("/", "~1")
