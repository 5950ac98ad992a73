"""Bounds the cost of divisors in a grammar, which become automata without any other bound.

For `multipleOf` llguidance builds an automaton with a state per remainder, and one per pair of
remainders where two divisors may meet; its own limits do not count these states. A divisor of ten
million took minutes and gigabytes. Pure. Tests: tests/unit/engine/test_grammar_cost.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from kvmesh.core.types import Structure, StructureKind

MAX_REMAINDERS = 100_000
"""Maximum states of all divisors, which take about a second. A day has 86,400 seconds."""

_MEETING = frozenset(
    {"$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
    | {"patternProperties", "additionalProperties", "unevaluatedProperties", "additionalItems"}
    | {"unevaluatedItems", "dependentSchemas", "contains", "propertyNames"}
)
"""Keys that may put one number under two divisors; without them divisors never meet."""

_INLINE = re.compile(r"%json\s*")


def divisor_problem(structure: Structure) -> str:
    """Returns why the divisors of a structure are too many or too large; empty if not."""
    divisors, names = _found(structure)
    apart = structure.kind is StructureKind.JSON_SCHEMA and names.isdisjoint(_MEETING)
    states = 0 if apart else 1
    for divisor in set(divisors):
        states = states + _remainders(divisor) if apart else states * _remainders(divisor)
        if states > MAX_REMAINDERS:
            return (
                f"multipleOf: the {'sum' if apart else 'product'} of all divisors must be at most "
                f"{MAX_REMAINDERS}, without their decimal point"
            )
    return ""


def _remainders(divisor: Decimal) -> int:
    """Returns the number of states of one divisor, capped at one more than the maximum."""
    _, digits, exponent = divisor.as_tuple()
    if not isinstance(exponent, int):
        return MAX_REMAINDERS + 1  # infinity or NaN
    # Not `normalize`, which rounds.
    written = "".join(map(str, digits)).lstrip("0")
    text = written.rstrip("0")
    num_zeros = max(exponent + len(written) - len(text), 0)
    if text == "1":
        return 1  # for a power of ten only the last digits matter
    if len(text) + num_zeros > len(str(MAX_REMAINDERS)):
        return MAX_REMAINDERS + 1
    zeros: int = 10**num_zeros
    return int(text or "1") * zeros


def _found(structure: Structure) -> tuple[list[Decimal], set[str]]:
    """Returns all divisors and all names, including values that a later duplicate hides."""
    found: list[Decimal] = []
    names: set[str] = set()

    def note(pairs: list[tuple[str, Any]]) -> None:
        names.update(name for name, value in pairs if not isinstance(value, bool))
        found.extend(
            value for name, value in pairs if name == "multipleOf" and isinstance(value, Decimal)
        )

    decoder = json.JSONDecoder(
        object_pairs_hook=note, parse_int=_number, parse_float=_number, parse_constant=_number
    )
    for start in schema_starts(structure):
        try:
            decoder.raw_decode(structure.text, start)
        except (ValueError, RecursionError):
            continue  # the compiler reports its error
    return found, names


def _number(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # its exponent exceeds a Decimal's
        return Decimal("Infinity")


def schema_starts(structure: Structure) -> Iterator[int]:
    """Yields the positions in the text where JSON schemas begin."""
    if structure.kind is StructureKind.JSON_SCHEMA:
        yield len(structure.text) - len(structure.text.lstrip())
    elif structure.kind is StructureKind.LARK:
        yield from (each.end() for each in _INLINE.finditer(structure.text))
