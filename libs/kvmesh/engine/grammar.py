"""Structures as llguidance grammars, and checks that they compile. No torch, no numpy.

Gateways check structures before workers compile them. Tests: tests/unit/engine/test_structure.py.
"""

from __future__ import annotations

from functools import cache

from llguidance import LLMatcher, LLTokenizer

from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.endless_schema import endless_problem
from kvmesh.engine.grammar_cost import divisor_problem
from kvmesh.engine.pattern_cost import pattern_problem

NO_TEXT = "no text satisfies it; does a $ref in it lead back to itself?"

_JSON_SPACE = r"[ \n]{0,24}"
"""White space between JSON tokens: enough for deep indents, but bounded."""


def grammar_text(structure: Structure) -> str:
    """Returns the grammar of a structure, for `LLMatcher`.

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
    """Returns why the structure cannot be compiled; empty if it can. Takes up to a second."""
    try:
        grammar = grammar_text(structure)
        found, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    except ValueError as error:
        return str(error)
    if found:
        return str(messages[0])
    if problem := endless_problem(structure):
        return problem
    return "" if _allows_text(grammar) else NO_TEXT


def _allows_text(grammar: str) -> bool:
    """Returns whether any text can begin; the compiler accepts schemas without any text."""
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    matcher.compute_bitmask()
    return not matcher.is_error()


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")
