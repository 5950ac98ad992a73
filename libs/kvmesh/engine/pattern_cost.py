"""Bounds the cost of patterns in a schema: it doubles with each pattern that holds for one text.

llguidance computes whether any text follows all patterns, with time and memory that double with
every pattern, and its own limits do not cover that: 20 patterns took 13 s and 250 MiB. It compares
name patterns of `patternProperties` in pairs, each in full.

The count here is an upper bound of the patterns that meet. Parts of an `allOf` are added up
wherever in them patterns lie, so a schema that refers to itself grows in each round: a document
with more than `MAX_MEETING` patterns may be refused though few of them meet. An exact count would
have to follow sets of schemas that hold together, and alternatives multiply those. Pure. Tests:
tests/unit/engine/test_pattern_cost.py.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.types import Structure
from kvmesh.engine.grammar_cost import schema_starts
from kvmesh.engine.schema_refs import References

MAX_MEETING = 14
"""Maximum number of patterns that may hold for one text, which takes a fifth of a second. With more
than a few different patterns the compiler cannot tell whether any text follows all, and refuses."""

MAX_NAME_PATTERNS = 100
"""Maximum number of names in all `patternProperties`, which takes a fifth of a second."""

_PATTERNS = ("pattern", "format")
_ALL = ("allOf", "if", "then", "else", "not", "contains", "propertyNames")
_ONE = ("anyOf", "oneOf")
_PLACES = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems")
_PLACES_IN_LISTS = ("items", "prefixItems")
_PLACES_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
_ROUNDS = 8
"""Maximum number of counting rounds; references that need more count as the worst case."""

_BEGINNING = re.compile(r"\^([A-Za-z0-9_-]*)(?![A-Za-z0-9_*?{-])")
"""Matches the mandatory first letters of a pattern."""

_UNFOLLOWED = ("$dynamicRef", "$recursiveRef")


def pattern_problem(structure: Structure) -> str:
    """Returns why the patterns of a structure are too many; empty if they are not."""
    for start in schema_starts(structure):
        try:
            schema, _ = json.JSONDecoder().raw_decode(structure.text, start)
        except (ValueError, RecursionError):
            continue  # the compiler reports its error
        try:
            problem = _problem(schema)
        except RecursionError:
            return "pattern: the schema is nested, or refers from one to the next, too deeply"
        if problem:
            return problem
    return ""


def _problem(schema: Any) -> str:
    counted = _Counted(schema)
    if counted.num_names > MAX_NAME_PATTERNS:
        return (
            f"patternProperties: at most {MAX_NAME_PATTERNS} names are allowed, "
            f"got {counted.num_names}"
        )
    # Whatever the references are, no more patterns can meet than the document has.
    if len(counted.patterns) > MAX_MEETING and counted.most_meeting() > MAX_MEETING:
        return f"pattern: at most {MAX_MEETING} patterns and formats may hold for one text"
    return ""


@dataclass(slots=True)
class _Counted:
    """Counts of one document.

    Attributes:
        patterns: all distinct patterns in it.
        num_names: number of names of `patternProperties`.
    """

    root: Any
    patterns: set[str] = field(default_factory=set)
    num_names: int = 0
    _references: References = field(init=False)
    _by_ref: dict[str, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _of: dict[int, int] = field(default_factory=dict)
    """Counts of schemas in this round, by id: many references may lead to one schema."""

    def __post_init__(self) -> None:
        self._references = References(self.root)
        self._collect(self.root)

    def _collect(self, value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                self._collect(each)
        elif isinstance(value, dict):
            self.patterns.update(_own(value))
            named = value.get("patternProperties")
            self.num_names += len(named) if isinstance(named, dict) else 0
            for each in value.values():
                self._collect(each)

    def most_meeting(self) -> int:
        """Returns an upper bound of the patterns that hold for one text anywhere."""
        # A schema that refers to itself counts with its value of the previous round.
        for _ in range(_ROUNDS):
            before = dict(self._by_ref)
            self._seen.clear()
            self._of.clear()
            found = self._meeting(self.root)
            if self._by_ref == before:
                return found
        return len(self.patterns)

    def _meeting(self, schema: Any) -> int:
        """Returns an upper bound under this schema, with the known counts of references.

        Schemas that all hold add up; of alternatives one counts. A place inside of a value meets
        the same place inside of the others, so the maximum over these places counts.
        """
        if not isinstance(schema, dict):
            return 0
        known = self._of.get(id(schema))
        if known is None:
            known = self._of[id(schema)] = self._counted(schema)
        return known

    def _counted(self, schema: Mapping[str, Any]) -> int:
        total = max(len(_own(schema)), self._within(schema))
        for name in _ALL:
            total += sum(self._meeting(each) for each in _listed(schema.get(name)))
        for name in _ONE:
            total += max((self._meeting(each) for each in _listed(schema.get(name))), default=0)
        if any(name in schema for name in _UNFOLLOWED):
            total += len(self.patterns)
        if "$ref" in schema:
            total += self._meeting_at(schema["$ref"])
        return min(total, len(self.patterns))

    def _within(self, schema: Mapping[str, Any]) -> int:
        """Returns an upper bound for any single place inside of a value."""
        most = max((self._meeting(each) for each in _places(schema)), default=0)
        named, patterned = schema.get("properties"), schema.get("patternProperties")
        if not (named and isinstance(named, dict) and isinstance(patterned, dict)):
            return most
        # A named property also matches name patterns: at most one, as no two may fit one name.
        names, of_named = sorted(named), max(map(self._meeting, named.values()))
        fitting = (each for pattern, each in patterned.items() if _may_fit(pattern, names))
        return max(most, of_named + max(map(self._meeting, fitting), default=0))

    def _meeting_at(self, ref: Any) -> int:
        if not isinstance(ref, str):
            return 0
        if ref not in self._seen:
            self._seen.add(ref)
            found, target = self._references.target(ref)
            self._by_ref[ref] = self._meeting(target) if found else len(self.patterns)
        return self._by_ref.get(ref, 0)


def _own(schema: Mapping[str, Any]) -> set[str]:
    return {each for name in _PATTERNS if isinstance(each := schema.get(name), str)}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _places(schema: Mapping[str, Any]) -> list[Any]:
    """Returns the schemas of everything inside of a value."""
    found = [schema.get(name) for name in _PLACES]
    for name in _PLACES_IN_LISTS:
        found += _listed(schema.get(name))
    for name in _PLACES_BY_NAME:
        named = schema.get(name)
        found += named.values() if isinstance(named, dict) else ()
    return found


def _may_fit(pattern: str, names: Sequence[str]) -> bool:
    """Returns whether a pattern's first letters may fit one of some sorted names."""
    begins = None if "|" in pattern else _BEGINNING.match(pattern)
    prefix = begins[1] if begins else ""
    at = bisect_left(names, prefix)
    return at < len(names) and names[at].startswith(prefix)
