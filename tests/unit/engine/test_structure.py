from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvmesh.core.errors import CheckpointError, StructureError
from kvmesh.core.types import Structure, StructureKind
from kvmesh.engine.grammar import NO_TEXT, structure_problem
from kvmesh.engine.structure import GrammarConstraint, StructureCompiler
from tests.unit.gateway.tiny_model import EOS, make_tokenizer

VOCAB_SIZE = 330  # wider than the tokenizer, as padded checkpoints are
OTHER_EOS = 0

SCHEMA = Structure(
    StructureKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
            "required": ["ok", "n"],
            "additionalProperties": False,
        }
    ),
)
DIGITS = Structure(StructureKind.REGEX, "[0-9]{2,4}")
WORDS = Structure(StructureKind.LARK, 'start: "yes" | "no" " "? "way"')


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture
def compiler(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[StructureCompiler]:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    made = StructureCompiler(path, VOCAB_SIZE, frozenset({EOS, OTHER_EOS}))
    yield made
    made.close()


def ids(constraint: GrammarConstraint, generated: Sequence[int]) -> list[int]:
    return [int(i) for i in constraint.allowed(generated).nonzero()[0]]


def write(constraint: GrammarConstraint, choices: Iterator[int], limit: int = 60) -> list[int]:
    """Generates with a source of choices until the end is chosen."""
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = ids(constraint, tokens)
        token = allowed[next(choices) % len(allowed)]
        if token in (EOS, OTHER_EOS):
            return tokens
        tokens.append(token)
    return tokens


def numbers(seed: int) -> Iterator[int]:
    value = seed
    while True:
        value = (value * 1103515245 + 12345) % 2**31
        yield value >> 8


@pytest.mark.parametrize("seed", range(5))
def test_what_is_generated_follows_the_structure(
    compiler: StructureCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    digits = tokenizer.decode(write(compiler.constraint(DIGITS), numbers(seed)))
    assert re.fullmatch("[0-9]{2,4}", digits)
    words = tokenizer.decode(write(compiler.constraint(WORDS), numbers(seed)))
    assert words in {"yes", "noway", "no way"}
    text = tokenizer.decode(write(compiler.constraint(SCHEMA), numbers(seed), 300))
    found = json.loads(text)
    assert found["n"] in (1, 22)
    assert isinstance(found["ok"], bool)
    assert set(found) == {"n", "ok"}


def test_state_is_a_function_of_the_tokens_so_far(compiler: StructureCompiler) -> None:
    tokens = write(compiler.constraint(SCHEMA), numbers(3), 300)
    step_by_step = compiler.constraint(SCHEMA)
    for end in range(len(tokens) + 1):
        expected = ids(step_by_step, tokens[:end])
        assert ids(compiler.constraint(SCHEMA), tokens[:end]) == expected, end


def test_every_end_token_may_end_a_complete_text(
    compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    yes = tokenizer.encode("yes").ids
    constraint = compiler.constraint(WORDS)
    assert ids(constraint, yes) == [OTHER_EOS, EOS]
    assert ids(constraint, [*yes, EOS]) == [OTHER_EOS, EOS]  # ends that are ignored
    assert ids(constraint, [*yes, EOS, OTHER_EOS]) == [OTHER_EOS, EOS]


def test_a_token_that_does_not_fit_is_an_error(
    compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    with pytest.raises(StructureError, match="does not follow"):
        compiler.constraint(DIGITS).allowed(tokenizer.encode("x").ids)


def test_what_cannot_be_compiled_is_an_error_at_each_sequence(compiler: StructureCompiler) -> None:
    broken = Structure(StructureKind.REGEX, "[a-z")
    for _ in range(2):
        with pytest.raises(StructureError, match="cannot be compiled"):
            compiler.constraint(broken).allowed([])


def test_a_place_where_nothing_can_follow_is_told_in_words(
    compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    endless: dict[str, object] = {
        "$defs": {"x": {"$ref": "#/$defs/x"}},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/x"}],
        "minItems": 1,
    }
    constraint = compiler.constraint(Structure(StructureKind.JSON_SCHEMA, json.dumps(endless)))
    with pytest.raises(StructureError, match=re.escape(NO_TEXT)):
        constraint.allowed(tokenizer.encode("[").ids)


def test_a_tokenizer_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        StructureCompiler(path, VOCAB_SIZE, frozenset())


@pytest.mark.parametrize(
    ("structure", "problem"),
    [
        (SCHEMA, ""),
        (DIGITS, ""),
        (WORDS, ""),
        (Structure(StructureKind.REGEX, "[a-z"), "unclosed"),
        (Structure(StructureKind.LARK, "start: foo"), "unknown name"),
        (Structure(StructureKind.JSON_SCHEMA, '{"type": "foo"}'), "Invalid type"),
        (Structure(StructureKind.JSON_SCHEMA, "{bad"), "key must be a string"),
        (Structure(StructureKind.JSON_SCHEMA, '{"$ref":"#"}'), "# leads back to #"),
        (Structure(StructureKind.JSON_SCHEMA, '{"anyOf":[{"$ref":"#"}]}'), "leads back to #"),
        (Structure(StructureKind.JSON_SCHEMA, '{"$anchor":"a","$ref":"#a"}'), NO_TEXT),
        (Structure(StructureKind.JSON_SCHEMA, '{"anyOf":[{"$ref":"#"},{"type":"null"}]}'), ""),
        (Structure(StructureKind.JSON_SCHEMA, '{"type":"array","items":{"$ref":"#"}}'), ""),
    ],
)
def test_problems_are_known_before_anything_runs(structure: Structure, problem: str) -> None:
    found = structure_problem(structure)
    assert (problem in found) if problem else not found


def test_who_waits_is_told_when_a_structure_is_ready(compiler: StructureCompiler) -> None:
    told = threading.Event()
    compiler.on_compiled = told.set
    constraint = compiler.constraint(DIGITS)
    assert told.wait(timeout=30)
    assert constraint.ready
    assert compiler.constraint(DIGITS).ready  # compiled once
