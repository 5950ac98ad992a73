"""Converts a request's constraints on its output to one structure.

Pure but for the compiler's check. Tests: tests/unit/gateway/api/test_structured.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BaseModel, ConfigDict, Field

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.grammar import structure_problem

MAX_STRUCTURE_CHARS = 65_536
MAX_GRAMMAR_CHARS = 16_384
MAX_CHOICES = 1024

JsonSchema = dict[str, Any]

_ANY_OBJECT = '{"type":"object"}'


class JsonSchemaFormat(BaseModel):
    """`response_format.json_schema`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    name: str = Field("", max_length=256)
    description: str | None = None
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`; exactly one field is set."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    json_schema: JsonSchema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class StructureFields(BaseModel):
    """Fields of a body that constrain the output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def structure_of(body: StructureFields) -> tuple[Structure | None, str]:
    """The structure that a body asks for, and the field that names it.

    Raises:
        InvalidRequestError: several fields ask for a structure, or it is too long.
    """
    if body.model_fields_set.isdisjoint(StructureFields.model_fields):
        return None, ""  # most requests have none; this skips ten checks
    found = {name: each for name, each in _candidates(body) if each is not None}
    if len(found) > 1:
        names = " and ".join(found)
        raise InvalidRequestError(f"{names}: only one of them is allowed", list(found)[1])
    for name, structure in found.items():
        check_length(structure, name)
        return structure, name
    return None, ""


def check_length(structure: Structure, field: str) -> None:
    """Checks the length of a structure.

    Raises:
        InvalidRequestError: it is too long.
    """
    if len(structure.text) > MAX_STRUCTURE_CHARS:
        raise InvalidRequestError(
            f"{field}: at most {MAX_STRUCTURE_CHARS} characters are allowed", field
        )


def _candidates(body: StructureFields) -> list[tuple[str, Structure | None]]:
    outputs = body.structured_outputs or StructuredOutputs.model_validate({})
    prefix = "structured_outputs."
    return [
        ("response_format", _of_format(body.response_format)),
        (prefix + "json", _of_schema(outputs.json_schema)),
        (prefix + "json_object", json_schema(_ANY_OBJECT) if outputs.json_object else None),
        (prefix + "regex", _of_text(StructureKind.REGEX, outputs.regex)),
        (prefix + "choice", _of_choices(outputs.choice)),
        (prefix + "grammar", _of_grammar(outputs.grammar, prefix + "grammar")),
        ("guided_json", _of_schema(body.guided_json)),
        ("guided_regex", _of_text(StructureKind.REGEX, body.guided_regex)),
        ("guided_choice", _of_choices(body.guided_choice)),
        ("guided_grammar", _of_grammar(body.guided_grammar, "guided_grammar")),
    ]


def _of_format(given: ResponseFormat | None) -> Structure | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return json_schema(_ANY_OBJECT)
    if given.json_schema is None:
        raise InvalidRequestError(
            "response_format.json_schema is needed with type json_schema",
            "response_format.json_schema",
        )
    return json_schema(given.json_schema.json_schema)


def json_schema(schema: JsonSchema | str) -> Structure:
    """Makes a structure from a JSON schema, given as an object or as text.

    Raises:
        InvalidRequestError: it is nested too deep to be serialised.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, separators=(",", ":"))
    except RecursionError as error:
        raise InvalidRequestError("a JSON schema is nested too deep") from error
    return Structure(StructureKind.JSON_SCHEMA, text)


def _of_schema(schema: JsonSchema | str | None) -> Structure | None:
    return None if schema is None else json_schema(schema)


def _of_text(kind: StructureKind, text: str | None) -> Structure | None:
    return None if text is None else Structure(kind, text)


def _of_choices(choices: Sequence[str] | None) -> Structure | None:
    if choices is None:
        return None
    words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Structure(StructureKind.LARK, f"start: {words}")


def _of_grammar(text: str | None, field: str) -> Structure | None:
    """Converts a grammar in the notation of Lark, or of llama.cpp and xgrammar."""
    if text is None:
        return None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{field}: at most {MAX_GRAMMAR_CHARS} characters are allowed", field
        )
    try:
        return Structure(StructureKind.LARK, any_to_lark(text))
    except Exception as error:  # the library raises bare exceptions for bad grammars
        raise InvalidRequestError(f"{field}: the grammar cannot be read: {error}", field) from error


def check_structure(structure: Structure, field: str) -> None:
    """Checks that a structure can be compiled. May take a second: call it in a thread.

    Raises:
        InvalidRequestError: it cannot.
    """
    problem = _problem(structure)
    if problem:
        raise InvalidRequestError(f"{field}: {problem}", field, "invalid_structure")


@lru_cache(maxsize=256)
def _problem(structure: Structure) -> str:
    return structure_problem(structure)


def tool_schema(name: str, parameters: Mapping[str, Any] | None) -> JsonSchema:
    """The JSON schema of one call."""
    return {
        "type": "object",
        "properties": {
            "name": {"type": "string", "enum": [name]},
            "parameters": dict(parameters or {"type": "object", "properties": {}}),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
