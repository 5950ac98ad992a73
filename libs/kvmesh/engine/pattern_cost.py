"""What a schema's patterns cost where several hold for one text: twice as much with each.

llguidance asks whether any text follows all of them, in time and memory that double with every
pattern, and its own limits do not count that: 20 took 13 s and 250 MiB. The patterns that
`patternProperties` gives to names are compared in pairs, each in full.
What is counted is at least what meets. Parts of an `allOf` are added up wherever in them patterns
lie, so one that refers to itself grows in each round: in a document with more than `MAX_MEETING`
patterns it may be refused though few of them meet. To be exact, sets of schemas that hold together
would have to be followed, and alternatives multiply those.
Pure. Tests: tests/unit/engine/test_pattern_cost.py.
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

MAX_MEETING = 14
"""Most patterns that may hold for one text: a fifth of a second. Of more than a few that differ the
compiler cannot tell whether any text follows them all, and refuses."""

MAX_NAME_PATTERNS = 100
"""Most names of `patternProperties` in all: a fifth of a second."""

_PATTERNS = ("pattern", "format")
_ALL = ("allOf", "if", "then", "else", "not", "contains", "propertyNames")
_ONE = ("anyOf", "oneOf")
_PLACES = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "additionalItems")
_PLACES_IN_LISTS = ("items", "prefixItems")
_PLACES_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
_ROUNDS = 8
"""A schema whose references need more to be counted is taken for the worst."""

_BEGINNING = re.compile(r"\^([A-Za-z0-9_-]*)(?![A-Za-z0-9_*?{-])")
"""Letters of which none may be left out."""

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

_UNFOLLOWED = ("$dynamicRef", "$recursiveRef")


def pattern_problem(structure: Structure) -> str:
    """Why the patterns of a structure are too many; empty if they are not."""
    for start in schema_starts(structure):
        try:
            schema, _ = json.JSONDecoder().raw_decode(structure.text, start)
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong with it
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
    # Whatever refers to whatever: no more can meet than there are.
    if len(counted.patterns) > MAX_MEETING and counted.most_meeting() > MAX_MEETING:
        return f"pattern: at most {MAX_MEETING} patterns and formats may hold for one text"
    return ""


@dataclass(slots=True)
class _Counted:
    """Counts in one document.

    Attributes:
        patterns: all that are in it, each once.
        num_names: of `patternProperties`.
    """

    root: Any
    patterns: set[str] = field(default_factory=set)
    num_names: int = 0
    _by_ref: dict[str, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _of: dict[int, int] = field(default_factory=dict)
    """What was found of a schema in this round, by its id: many references may lead to it."""

    def __post_init__(self) -> None:
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
        """At most so many patterns hold for one text anywhere."""
        # What refers to itself counts with what it had the round before.
        for _ in range(_ROUNDS):
            before = dict(self._by_ref)
            self._seen.clear()
            self._of.clear()
            found = self._meeting(self.root)
            if self._by_ref == before:
                return found
        return len(self.patterns)

    def _meeting(self, schema: Any) -> int:
        """At most so many under this schema, as far as is known of references.

        What all hold adds up, of alternatives one does; a place within meets the same place within
        the others, so at most what these have anywhere.
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
        """At most so many at any place inside of a value."""
        most = max((self._meeting(each) for each in _places(schema)), default=0)
        named, patterned = schema.get("properties"), schema.get("patternProperties")
        if not (named and isinstance(named, dict) and isinstance(patterned, dict)):
            return most
        # What has a name falls under a pattern of names too: under one, as no two may fit a name.
        names, of_named = sorted(named), max(map(self._meeting, named.values()))
        fitting = (each for pattern, each in patterned.items() if _may_fit(pattern, names))
        return max(most, of_named + max(map(self._meeting, fitting), default=0))

    def _meeting_at(self, ref: Any) -> int:
        if not isinstance(ref, str):
            return 0
        if ref not in self._seen:
            self._seen.add(ref)
            found, target = _pointed(self.root, ref)
            self._by_ref[ref] = self._meeting(target) if found else len(self.patterns)
        return self._by_ref.get(ref, 0)


def _own(schema: Mapping[str, Any]) -> set[str]:
    return {each for name in _PATTERNS if isinstance(each := schema.get(name), str)}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else (value,)


def _places(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of what is inside of a value."""
    found = [schema.get(name) for name in _PLACES]
    for name in _PLACES_IN_LISTS:
        found += _listed(schema.get(name))
    for name in _PLACES_BY_NAME:
        named = schema.get(name)
        found += named.values() if isinstance(named, dict) else ()
    return found


def _may_fit(pattern: str, names: Sequence[str]) -> bool:
    """Whether a pattern may fit one of some sorted names, by the letters that it begins with."""
    begins = None if "|" in pattern else _BEGINNING.match(pattern)
    prefix = begins[1] if begins else ""
    at = bisect_left(names, prefix)
    return at < len(names) and names[at].startswith(prefix)


def _pointed(root: Any, ref: str) -> tuple[bool, Any]:
    """What a reference within the document points to; False if it goes another way."""
    if ref != "#" and not ref.startswith("#/"):
        return False, None
    value = root
    for step in ref.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and _INDEX.fullmatch(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            return False, None
    return True, value
