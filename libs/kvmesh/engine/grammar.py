"""Structures as grammars of llguidance, and whether they can be compiled. No torch, no numpy.

Gateways check with it what workers will compile. Tests: tests/unit/engine/test_structure.py.
"""

from __future__ import annotations

from llguidance import LLMatcher

from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.grammar_cost import divisor_problem
from kvmesh.engine.pattern_cost import pattern_problem

_JSON_SPACE = r"[ \n]{0,24}"
"""White space between JSON tokens: enough for deep indents, no endless run of blanks."""


def grammar_text(structure: Structure) -> str:
    """The grammar of a structure, for `LLMatcher`.

    Raises:
        ValueError: a JSON schema that is not JSON, divisors that are too large, or too many
            patterns.
    """
    if problem := divisor_problem(structure) or pattern_problem(structure):
        raise ValueError(problem)
    if structure.kind is StructureKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(
            structure.text, overrides={"whitespace_pattern": _JSON_SPACE, "coerce_one_of": True}
        )
    if structure.kind is StructureKind.REGEX:
        return LLMatcher.grammar_from_regex(structure.text)
    return LLMatcher.grammar_from_lark(structure.text)


def structure_problem(structure: Structure) -> str:
    """Why the structure cannot be compiled; empty if it can. May take a second: use a thread."""
    try:
        found, messages = LLMatcher.validate_grammar_with_warnings(grammar_text(structure))
    except ValueError as error:
        return str(error)
    return messages[0] if found else ""
