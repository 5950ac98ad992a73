"""Files, headers, log events and defaults that the documents name."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from kvmesh.core.config import Option, options_of
from scripts.gen_config_docs import SERVICES
from tests.unit.docs.documents import ROOT, code_spans, documents, prose

_FILE = re.compile(r"[\w./-]*\w\.(?:py|cpp|h|proto|md|json|yaml|yml|toml|sh|js|css|html|lua)")
_WRITTEN = {"stack.json", ".kvmesh/stack.json", "/openapi.json"}
"""Made by what runs."""
_HEADER = re.compile(r"x-[a-z-]+")
_EVENT = re.compile(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| (?:info|warning|error) \|", re.MULTILINE)
_DEFAULT = re.compile(r"^\| `([a-z_]+(?:\.[a-z_]+)+)` \| `?([^|`]*)`? \|(?!.*\n\|-)", re.MULTILINE)
_SIZES = {"MiB": 1 << 20, "GiB": 1 << 30}
_IN_WORDS = {"folder name"}

each_document = pytest.mark.parametrize(
    "document", documents(), ids=lambda path: str(path.relative_to(ROOT))
)


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


@each_document
def test_files_exist(document: Path) -> None:
    for name in set(code_spans(document)) - _WRITTEN:
        if _FILE.fullmatch(name) and not (document.parent / name).exists():
            paths = files().get(name.rpartition("/")[2], [])
            assert any(path.endswith(f"/{name}") for path in paths), name


@each_document
def test_headers_are_read_or_written(document: Path) -> None:
    for name in code_spans(document):
        if _HEADER.fullmatch(name):
            assert f'"{name}"' in source() or f'"{name.title()}"' in source(), name


def test_log_events_are_written() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    events = re.findall(r"`([a-z_]+)`", " ".join(_EVENT.findall(text)))
    assert "request_finished" in events
    missing = [event for event in events if f'"{event}"' not in source()]
    assert not missing


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
