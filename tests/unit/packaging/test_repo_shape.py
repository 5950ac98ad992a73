"""Rules of CONTRIBUTING.md that no linter has: sizes, options that somebody reads, tests that are
where modules say.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvmesh.core.config import options_of
from scripts.gen_config_docs import SERVICES
from tests.unit.docs.documents import ROOT

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
FOLDERS = ("benchmarks", "libs", "models", "scripts", "services", "tests")

_TEST_FILE = re.compile(r"\btests/[\w/]+\.py\b")


def sources(*folders: str) -> list[Path]:
    """What people wrote: without stubs."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [path for path in found if not path.stem.endswith(("_pb2", "_pb2_grpc"))]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def long_functions(tree: ast.Module, most: int) -> list[str]:
    """Functions with more lines than that."""
    found = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [each.name for each in found if (each.end_lineno or each.lineno) - each.lineno >= most]


def test_files_have_a_size_that_can_be_read() -> None:
    sizes = {name_of(path): path.read_text().count("\n") for path in sources(*FOLDERS)}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_functions_have_a_size_that_can_be_read() -> None:
    kernels = ROOT / "libs/kvmesh/kernels"
    found = {
        name_of(path): long_functions(
            parsed(path), MAX_KERNEL_LINES if path.parent == kernels else MAX_FUNCTION_LINES
        )
        for path in sources(*FOLDERS)
    }
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_a_long_function_is_found() -> None:
    def function(num_lines: int) -> ast.Module:
        return ast.parse("def f():\n" + "    pass\n" * (num_lines - 1))

    assert long_functions(function(7), 7) == []
    assert long_functions(function(8), 7) == ["f"]


@cache
def attributes_read() -> set[str]:
    """Of whatever object, anywhere in the services and the library."""
    nodes = (node for path in sources("libs", "services") for node in ast.walk(parsed(path)))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("service", SERVICES)
def test_all_options_are_read(service: str) -> None:
    paths = [leaf.path for leaf in options_of(SERVICES[service])]
    assert [path for path in paths if not attributes_read().issuperset(path)] == []


def test_the_tests_that_a_module_names_are_there() -> None:
    named = [
        (name_of(path), test)
        for path in sources(*FOLDERS)
        for test in _TEST_FILE.findall(ast.get_docstring(parsed(path)) or "")
    ]
    assert len(named) > 100
    assert [(name, test) for name, test in named if not (ROOT / test).is_file()] == []
