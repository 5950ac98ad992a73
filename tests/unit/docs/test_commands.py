from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvmesh.cli.__main__ import COMMANDS, main
from kvmesh.core.config import options_of
from scripts.gen_config_docs import SERVICES
from tests.unit.docs.documents import ROOT, code_spans, commands, documents

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9.-]*")
_VERB = re.compile(r"\bmake ([a-z][a-z0-9-]*)")
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")
_SPAN_NAME = re.compile(r"(?:start_span|_span)\(\s*\"([a-z_.]+)\"")
_ENV = re.compile(r"KVMESH_[A-Z0-9_]+")
_OF_EVERY_SERVICE = {"--config", "--print-config", "--help"}

each_document = pytest.mark.parametrize(
    "document", documents(), ids=lambda path: str(path.relative_to(ROOT))
)


def flags_of_service(name: str) -> set[str]:
    return {leaf.flag for leaf in options_of(SERVICES[name])} | _OF_EVERY_SERVICE


def flags_of_command(name: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    return set(_FLAG.findall(capsys.readouterr().out))


def option_names() -> set[str]:
    return {".".join(leaf.path) for config in SERVICES.values() for leaf in options_of(config)}


def environment_names() -> set[str]:
    return {leaf.env for config in SERVICES.values() for leaf in options_of(config)}


def span_names() -> set[str]:
    files = [*(ROOT / "libs/kvmesh").rglob("*.py"), *(ROOT / "services").rglob("*.py")]
    return {name for file in files for name in _SPAN_NAME.findall(file.read_text())}


@each_document
def test_make_verbs_exist(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))
    assert "up" in verbs
    for command in commands(document):
        if command.startswith("make "):
            assert set(_VERB.findall(command)) <= verbs, command


@each_document
def test_flags_exist(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags after a command are that command's; a flag alone is somebody's of ours."""
    of_commands = {name: flags_of_command(name, capsys) for name in COMMANDS}
    all_flags = set[str]().union(*of_commands.values(), *map(flags_of_service, SERVICES))
    for command in commands(document):
        used = set(_FLAG.findall(command))
        if service := re.search(r"python -m services\.([a-z]+)\b", command):
            assert used <= flags_of_service(service[1]), command
        elif own := re.search(r"\bkvmesh(?:\.cli)? ([a-z]+)\b", command):
            assert own[1] in COMMANDS, command
            assert used <= of_commands[own[1]], command
        elif command.startswith("--"):
            assert used <= all_flags, command


@each_document
def test_options_and_spans_exist(document: Path) -> None:
    options, spans = option_names(), span_names()
    sections = {name.split(".")[0] for name in (*options, *spans)}
    for name in code_spans(document):
        is_file = name.endswith((".py", ".proto", ".md", ".json", ".jsonl", ".log", ".h", ".cpp"))
        if _DOTTED.fullmatch(name) and name.split(".")[0] in sections and not is_file:
            assert name in options or name in spans, name


def test_environment_variables_exist() -> None:
    stack = ROOT / "docker-compose.yml"
    own = set(re.findall(r"\$\{(KVMESH_[A-Z0-9_]+)", stack.read_text()))
    # Read by the launcher and the TOML lookup, not part of a service's config.
    known = environment_names() | own | {"KVMESH_URL", "KVMESH_TARGET", "KVMESH_CONFIG"}
    known.add("KVMESH_API_KEY")  # of the commands that ask a gateway
    for file in (stack, *documents()):
        unknown = set(_ENV.findall(file.read_text())) - known
        assert not unknown, f"{file.relative_to(ROOT)}: {unknown}"
