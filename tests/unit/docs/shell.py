"""Commands that the documents tell people to type, as a shell would cut them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.unit.docs.documents import ROOT

PROGRAMS = {
    "make",
    "kvmesh",
    "python",
    ".venv/bin/python",
    "docker",
    "helm",
    "kubectl",
    "pip",
    "curl",
    "kill",
    "grep",
    "tr",
    "chmod",
    ".venv/bin/hf",
}
"""What commands begin with; another program in a console block is not known here."""

_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=")
_FENCE = re.compile(r"```(\w*)")
_SPAN = re.compile(r"`([^`\n]+)`")
_OPERATORS = "();<>|&"


class Command(NamedTuple):
    """One program and its arguments.

    Attributes:
        is_whole: stands alone to be typed; a command named in a sentence may leave parts out.
        variables: those that are set in front of it.
    """

    document: Path
    line: int
    is_whole: bool
    variables: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """What is run."""
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}: {' '.join(self.words)}"


def shell_commands(document: Path) -> Iterator[Command]:
    """Everything that is to be typed, in the order of the document."""
    for line, is_whole, text in _typed(document):
        for variables, words in simple_commands(text):
            yield Command(document, line, is_whole, variables, words)


def simple_commands(text: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """A line cut at pipes, lists and substitutions: variables that are set, and the words."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    words: list[str] = []
    is_file = False
    for token in [*lexer, ";"]:
        if set(token) <= set(_OPERATORS):
            is_file = set(token) <= {"<", ">"}
            if not is_file and words:
                yield _without_variables(words)
                words = []
        elif not is_file:
            words.append(token)
        else:
            is_file = False


def _without_variables(words: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    first = next((n for n, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    return tuple(words[:first]), tuple(words[first:])


def _typed(document: Path) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it is a command of its own, and its text, continuation lines joined."""
    kind: str | None = None
    lines = document.read_text().splitlines()
    taken = 0
    for n, line in enumerate(lines):
        if fence := _FENCE.match(line):
            kind = fence[1] if kind is None else None
        elif n < taken:
            continue
        elif kind == "console" and line.startswith("$ "):
            text, taken = _joined(lines, n, line.removeprefix("$ "))
            yield n + 1, True, text
        elif kind is None and line.startswith("    ") and _begins_command(line):
            text, taken = _joined(lines, n, line.strip())
            yield n + 1, True, text
        elif kind is None:
            spans: list[str] = _SPAN.findall(line)
            yield from ((n + 1, False, span) for span in spans if _begins_command(span))


def _begins_command(text: str) -> bool:
    words = (word for word in text.split() if not _ASSIGNMENT.match(word))
    return next(words, "") in PROGRAMS


def _joined(lines: list[str], n: int, text: str) -> tuple[str, int]:
    """The command that begins in a line, and the number of the line after it."""
    n += 1
    while text.endswith("\\") or text.count("'") % 2:
        text = f"{text.removesuffix(chr(92))}\n{lines[n]}"
        n += 1
    return text, n
