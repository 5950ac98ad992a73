"""What each command loads before it has something to do with it: the time that people wait."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvmesh.cli.__main__ import OWN_PARSERS

_LISTING = """\
import contextlib, io, sys
from kvmesh.cli.__main__ import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(*sys.modules)
"""
_HEAVY = {
    "aiohttp", "asyncio", "cryptography", "google.protobuf", "grpc", "importlib.metadata",
    "matplotlib", "numpy", "opentelemetry", "prometheus_client", "psutil", "pydantic", "redis",
    "rich", "scipy", "tokenizers", "torch",
}  # fmt: skip
_OF_OTHERS = {"asyncio", "importlib.metadata"}
"""What packages such as grpc and psutil load for themselves."""


def _loaded(code: str, *arguments: str) -> set[str]:
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return _HEAVY & set(finished.stdout.split())


@pytest.mark.parametrize("command", ["", *OWN_PARSERS])
def test_help_loads_nothing_heavy(command: str) -> None:
    assert _loaded(_LISTING, *command.split(), "--help") == set()


def test_wrong_usage_loads_nothing_heavy() -> None:
    assert _loaded(_LISTING, "up", "--prefil", "2") == set()


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("chat", {"aiohttp"}),
        ("top", {"google.protobuf", "grpc", "prometheus_client", "rich"}),
        ("up", {"grpc", "psutil", "rich"}),
        ("doctor", {"grpc", "psutil", "rich"}),
        ("fleet", {"google.protobuf", "grpc", "rich"}),
        ("health", {"grpc"}),
        ("plan", {"rich"}),
        ("simulate", {"rich"}),
    ],
)
def test_a_command_loads_what_it_works_with_and_no_more(module: str, needed: set[str]) -> None:
    loaded = _loaded(f"import sys, kvmesh.cli.{module}\nprint(*sys.modules)")
    assert loaded - _OF_OTHERS == needed
