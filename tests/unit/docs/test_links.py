from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.docs.documents import ROOT, Link, documents, links, slugs

_SYMBOL = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`")


def defined_in_python(file: Path, symbol: str) -> bool:
    """Whether `Class.method`, a function or a constant is defined in a module."""
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in symbol.split("."):
        found = [
            node
            for node in body
            if (
                isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name == name
            )
            or (
                isinstance(node, ast.Assign)
                and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)
            )
        ]
        if not found:
            return False
        body = found[0].body if isinstance(found[0], ast.ClassDef) else []
    return True


def defined(file: Path, symbol: str) -> bool:
    if file.suffix == ".py":
        return defined_in_python(file, symbol)
    pattern = rf"^\s*(message|enum|service|rpc) {symbol}\b"
    return re.search(pattern, file.read_text(), re.MULTILINE) is not None


def symbol_of(link: Link) -> str:
    """The symbol that a link's text names; empty if it names none, or just the file."""
    match = _SYMBOL.fullmatch(link.text)
    if match is None or link.file.suffix not in (".py", ".proto"):
        return ""
    return "" if match[1] == link.file.name else match[1]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_point_to_what_is_there(document: Path) -> None:
    for link in links(document):
        assert link.file.exists(), link
        if link.anchor:
            assert link.anchor in slugs(link.file), link
        if symbol := symbol_of(link):
            assert defined(link.file, symbol), f"{link}: {symbol} is not there"


def test_the_architecture_names_symbols() -> None:
    named = {symbol_of(link) for link in links(ROOT / "docs" / "architecture.md")} - {""}
    assert {"Search.run", "HandoffTable", "EngineCore.start_decode", "PrefillService"} <= named


def test_missing_symbols_are_found_missing() -> None:
    handoff = ROOT / "libs/kvmesh/kv/handoff.py"
    assert defined(handoff, "HandoffTable.commit")
    assert not defined(handoff, "HandoffTable.comit")
    assert not defined(handoff, "commit")
    protos = ROOT / "protos/kvmesh/v1/prefill_service.proto"
    assert defined(protos, "PrefillOffer")
    assert not defined(protos, "Offer")


def test_the_index_of_decisions_has_all_of_them_by_their_titles() -> None:
    folder = ROOT / "docs" / "adr"
    rows = re.findall(
        r"^\| \[(\d+)\]\(([^)]+)\) \| (.+) \|$", (folder / "README.md").read_text(), re.M
    )
    titles = [f"# {number}. {title}" for number, _, title in rows]
    pages = sorted(folder.glob("0*.md"))
    assert [name for _, name, _ in rows] == [page.name for page in pages]
    assert titles == [page.read_text().partition("\n")[0] for page in pages]
