"""Files, headers, log events, families, imports and defaults that the documents name."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from kvmesh.core.config import Option, options_of
from kvmesh.engine.families import FAMILIES
from scripts.gen_config_docs import SERVICES
from tests.unit.docs.documents import ROOT, code_spans, documents, prose

_FILE = re.compile(r"[\w./-]*\w\.(?:py|cpp|h|proto|md|json|yaml|yml|toml|sh|js|css|html|lua)")
_WRITTEN = {"stack.json", ".kvmesh/stack.json", "/openapi.json"}
"""Made by what runs."""
_PROGRAM = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HEADER = re.compile(r"x-[a-z-]+")
_EVENT = re.compile(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| (?:info|warning|error) \|", re.MULTILINE)
_DEFAULT = re.compile(r"^\| `([a-z_]+(?:\.[a-z_]+)+)` \| `?([^|`]*)`? \|(?!.*\n\|-)", re.MULTILINE)
_SIZES = {"MiB": 1 << 20, "GiB": 1 << 30}
_IN_WORDS = {"folder name"}


@cache
def files() -> dict[str, list[str]]:
    """Paths of the repository by their last part."""
    found = defaultdict(list)
    roots = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    for path in (*ROOT.iterdir(), *(each for root in roots for each in root.rglob("*"))):
        found[path.name].append(f"/{path.relative_to(ROOT)}")
    return found


@cache
def source() -> str:
    roots = (ROOT / "libs/kvmesh", ROOT / "services")
    return "\n".join(file.read_text() for root in roots for file in root.rglob("*.py"))


def test_files_exist() -> None:
    wrong = [
        f"{document.relative_to(ROOT)}: {name}"
        for document in documents()
        for name in set(code_spans(document)) - _WRITTEN
        if _FILE.fullmatch(name) and not is_file(document, name)
    ]
    assert not wrong


def is_file(document: Path, name: str) -> bool:
    """Whether a name is a file's beside the document, or the end of a path in the repository."""
    paths = files().get(name.rpartition("/")[2], [])
    return (document.parent / name).exists() or any(path.endswith(f"/{name}") for path in paths)


def test_headers_are_read_or_written() -> None:
    headers = {name for each in documents() for name in code_spans(each) if _HEADER.fullmatch(name)}
    assert "x-kvmesh-decision" in headers
    assert not {name for name in headers if f'"{name}"' not in source()}


def test_log_events_are_written() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    events = re.findall(r"`([a-z_]+)`", " ".join(_EVENT.findall(text)))
    assert "request_finished" in events
    missing = [event for event in events if f'"{event}"' not in source()]
    assert not missing


def test_programs_import_what_is_there() -> None:
    programs = [text for each in documents() for text in _PROGRAM.findall(each.read_text())]
    assert programs
    wrong = [name for program in programs for name in missing_imports(program)]
    assert not wrong


def missing_imports(program: str) -> list[str]:
    """Names that it imports from `kvmesh` and that are not there."""
    nodes = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)]
    return [
        f"{node.module}.{each.name}"
        for node in nodes
        if node.module and node.module.startswith("kvmesh")
        for each in node.names
        if not hasattr(importlib.import_module(node.module), each.name)
    ]


def test_what_is_not_there_is_found() -> None:
    assert missing_imports("from kvmesh.client import Client, Clint") == ["kvmesh.client.Clint"]
    assert is_file(ROOT / "README.md", "kv/handoff.py")
    assert not is_file(ROOT / "README.md", "kv/hand.py")


def test_the_table_of_model_families_names_all() -> None:
    text = (ROOT / "docs/adding-a-model.md").read_text()
    table = text.split("| `model_type` |", 1)[1].split("\n\n", 1)[0]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines()[2:])
    assert sorted(re.findall(r"`(\w+)`", first_cells)) == sorted(FAMILIES)


@pytest.mark.parametrize("service", SERVICES)
def test_defaults_in_a_services_readme_are_its_defaults(service: str) -> None:
    options = {".".join(leaf.path): leaf for leaf in options_of(SERVICES[service])}
    table = _DEFAULT.findall(prose(ROOT / "services" / service / "README.md"))
    rows = [(name, shown) for name, shown in table if name in options]
    assert rows, "it has a table of options"
    wrong = [(name, shown) for name, shown in rows if not is_default(options[name], shown.strip())]
    assert not wrong


def is_default(leaf: Option, shown: str) -> bool:
    """Whether a table's cell says an option's default."""
    if shown in _IN_WORDS or shown in {"", "–", "empty"}:
        return leaf.default in {"", None}
    if isinstance(leaf.default, bool):
        return shown == str(leaf.default).lower()
    if isinstance(leaf.default, str):
        return shown == str(leaf.default)
    number, _, unit = shown.partition(" ")
    return float(number) * _SIZES.get(unit, 1) == float(leaf.default)


@pytest.mark.parametrize("service", SERVICES)
def test_a_services_readme_names_its_modules(service: str) -> None:
    folder = ROOT / "services" / service
    spans = code_spans(folder / "README.md")
    named = {name.rpartition("/")[2] for name in spans}
    packages = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert packages <= set(spans)
    modules = {path.name for path in folder.glob("*.py")}
    assert modules - named <= {
        "__init__.py",
        "__main__.py",
        "config.py",
        "metrics.py",
        "service.py",
    }
