"""What all tests share: randomness, time limits, and which tests stay in one process."""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_ROOT = Path(__file__).parents[1]
_MESH_TIMEOUT_S = 180
# Fixtures of tests/e2e/conftest.py.
_SHARED_MESH = re.compile(r"\b(torch|fake)_(?:mesh|client)\b")
# Files of many models, or of many channels, which would keep one process busy at the end: their
# tests share nothing but what the first word of their first parameter names.
_MANY_CASES = frozenset(
    f"tests/{file}.py"
    for file in (
        "contract/test_channels",
        "e2e/test_bad_inputs",
        "e2e/test_interrupted_up",
        "e2e/test_tier_kinds",
        "integration/test_chained_families",
        "integration/test_config_fields",
        "integration/test_group_engine",
        "integration/test_transformers_equality",
    )
)

# A busy machine is slow, not wrong. With CI set, the examples are the same in every run, so that
# a change is judged by itself; anywhere else they are new each time and find what is left.
settings.register_profile(
    "kvmesh",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.load_profile("kvmesh")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Gives tests of whole meshes time to start them where everything is slow."""
    for item in items:
        if item.path.parent.name in ("chaos", "e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_MESH_TIMEOUT_S))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Describes a failure without a collection in between.

    To show a line, source is parsed, and before Python 3.11.8 a collection in the midst of that
    can end the whole run with a SystemError (gh-106905).
    """
    if call.excinfo is not None:
        gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: also says which tests of several files run in one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = _together
    return scheduler


def _together(test: str) -> str:
    """Names the tests that run in one process, in order: they share what is costly to start."""
    file, _, name = test.partition("::")
    if file.startswith(("tests/chaos/", "tests/property/test_attempt_mutations")):
        return test  # each kills a mesh of its own, or changes the rules in its own way
    if file in _MANY_CASES:
        (first,) = re.findall(r"^[\w.]*", name.partition("[")[2])
        return f"{file}::{first}"
    return _mesh_of(file) or file


@functools.cache
def _mesh_of(file: str) -> str:
    """The mesh that serves a whole run and that the tests of a file use; empty for none."""
    if not file.startswith("tests/e2e/"):
        return ""
    found = _SHARED_MESH.search((_ROOT / file).read_text())
    return found[1] if found else ""
