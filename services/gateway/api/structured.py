"""Converts a request's constraints on its output to one structure.

Pure but for the compiler's check. Tests: tests/unit/gateway/api/test_structured.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BaseModel, ConfigDict, Field

from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.endless_schema import endless_problem
from kvmesh.engine.grammar import structure_problem
from kvmesh.engine.schema_refs import objects_of

MAX_STRUCTURE_CHARS = 65_536
MAX_GRAMMAR_CHARS = 16_384
MAX_CHOICES = 1024

JsonSchema = dict[str, Any]

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")
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


def check_schemas(schemas: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks that tools whose calls are not constrained can be called. Call it in a thread.

    Args:
        schemas: of the parameters, by the tools' names. Very long ones are not checked.

    Raises:
        InvalidRequestError: no finite text satisfies one of the schemas.
    """
    num_chars = 0
    for name, schema in schemas.items():
        text = json_schema(dict(schema)).text
        num_chars += len(text)
        if num_chars <= MAX_STRUCTURE_CHARS and (problem := _endless(text)):
            raise InvalidRequestError(f"tools: {name}: {problem}", "tools", "invalid_structure")


@lru_cache(maxsize=256)
def _endless(text: str) -> str:
    return endless_problem(Structure(StructureKind.JSON_SCHEMA, text))


def has_references(schemas: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether any of the schemas refers to a schema."""
    return any("$ref" in part for part in objects_of([*schemas]))


def rebased(schema: JsonSchema, base: str) -> JsonSchema:
    """Returns a schema for use as a part of a document, with the references that this needs.

    Args:
        base: reference to the part.

    Raises:
        InvalidRequestError: the schema is nested too deep.
    """
    try:
        moved: JsonSchema = _rebased(schema, base)
    except RecursionError as error:
        raise InvalidRequestError("a JSON schema is nested too deep") from error
    return moved


def _rebased(value: Any, base: str) -> Any:
    if isinstance(value, list):
        return [_rebased(each, base) for each in value]
    if not isinstance(value, dict) or isinstance(value.get("$id"), str):
        return value  # with an id, it is the root of its own references
    moved = dict(value)
    for key, each in value.items():
        if key == "$ref" and isinstance(each, str) and (each == "#" or each.startswith("#/")):
            moved[key] = base + each[1:]
        elif key in _SCHEMAS_BY_NAME and isinstance(each, dict):
            moved[key] = {name: _rebased(part, base) for name, part in each.items()}
        elif key not in _VALUES:
            moved[key] = _rebased(each, base)
    return moved


def call_schema(name: str, parameters: JsonSchema) -> JsonSchema:
    """The JSON schema of one call."""
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
