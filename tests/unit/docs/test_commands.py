from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from kvmesh.cli.__main__ import COMMANDS, main
from kvmesh.core.config import options_of
from scripts.gen_config_docs import SERVICES
from tests.unit.docs.documents import ROOT, code_spans, documents
from tests.unit.docs.programs import chart_values, flags_of_command, wrong_in
from tests.unit.docs.shell import Command, shell_commands, simple_commands

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*")
_EXAMPLE = re.compile(r"^(?:examples?:)? +(?=kvmesh )")
_DOTTED = re.compile(r"[a-z_-]+(?:\.[a-z_-]+)+")
_SPAN_NAME = re.compile(r"(?:start_span|_span)\(\s*\"([a-z_.]+)\"")
_ENV = re.compile(r"KVMESH_[A-Z0-9_]+")
_OF_EVERY_SERVICE = {"--config", "--print-config", "--help"}

each_document = pytest.mark.parametrize(
    "document", documents(), ids=lambda path: str(path.relative_to(ROOT))
)


@cache
def all_flags() -> frozenset[str]:
    """Of all services and all commands."""
    of_services = {leaf.flag for config in SERVICES.values() for leaf in options_of(config)}
    of_commands = {flag for name in COMMANDS for flag in flags_of_command(name)}
    return frozenset(of_services | of_commands | {"--config", "--print-config", "--help"})


def option_names() -> set[str]:
    return {".".join(leaf.path) for config in SERVICES.values() for leaf in options_of(config)}


def environment_names() -> set[str]:
    return {leaf.env for config in SERVICES.values() for leaf in options_of(config)}


def span_names() -> set[str]:
    files = [*(ROOT / "libs/kvmesh").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    return {name for file in files for name in _SPAN_NAME.findall(file.read_text())}


@each_document
def test_each_command_can_be_typed_as_it_stands(document: Path) -> None:
    """Programs, verbs, variables, flags and their values, files, profiles, paths, bodies."""
    wrong = [
        f"{command}: {why}" for command in shell_commands(document) if (why := wrong_in(command))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_a_help_text_can_be_typed(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    examples = [line for line in shown.replace("\\\n", " ").splitlines() if _EXAMPLE.match(line)]
    assert examples, "a help text ends with an example"
    for line in examples:
        for variables, words in simple_commands(_EXAMPLE.sub("", line)):
            command = Command(ROOT / "README.md", 0, True, variables, words)
            assert not wrong_in(command), command


@each_document
def test_flags_named_alone_are_somebodys(document: Path) -> None:
    for span in code_spans(document):
        if span.startswith("--"):
            assert set(_FLAG.findall(span)) <= all_flags(), span


@each_document
def test_options_and_spans_exist(document: Path) -> None:
    options, spans = option_names(), span_names()
    if document.is_relative_to(ROOT / "deploy"):
        options |= chart_values()
    sections = {name.split(".")[0] for name in (*options, *spans)}
    for name in code_spans(document):
        is_file = name.endswith((".py", ".proto", ".md", ".json", ".jsonl", ".log", ".h", ".cpp"))
        if _DOTTED.fullmatch(name) and name.split(".")[0] in sections and not is_file:
            assert name.replace("-", "_") in options or name in spans, name


def test_environment_variables_exist() -> None:
    stack = ROOT / "docker-compose.yml"
    own = set(re.findall(r"\$\{(KVMESH_[A-Z0-9_]+)", stack.read_text()))
    # Read by the launcher and the TOML lookup, not part of a service's config.
    known = environment_names() | own | {"KVMESH_URL", "KVMESH_TARGET", "KVMESH_CONFIG"}
    # Twins of flags of the commands.
    known |= {"KVMESH_API_KEY", "KVMESH_REDIS_URL"}
    for file in (stack, *documents()):
        unknown = set(_ENV.findall(file.read_text())) - known
        assert not unknown, f"{file.relative_to(ROOT)}: {unknown}"
