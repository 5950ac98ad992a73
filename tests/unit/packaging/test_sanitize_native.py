"""The sanitizers find what they are for, in a library that Python loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import sanitize_native
from scripts.build_native import Target, find_compiler
from tests.native import needs_compiler

SOURCE = """
#include <cstdint>
#include <vector>
extern "C" int write_at(int64_t at) {
  std::vector<float> values(16);
  volatile float* memory = values.data();
  memory[at] = 1.0f;
  return 0;
}
extern "C" int twice(int value) { return value + value; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    source, made = folder / "wrong.cpp", folder / "wrong.so"
    source.write_text(SOURCE)
    flags = (*sanitize_native.FLAGS, "-fPIC", "-shared")
    subprocess.run([find_compiler() or "", *flags, str(source), "-o", str(made)], check=True)
    return made


def call(library: Path, function: str, value: int) -> subprocess.CompletedProcess[str]:
    program = f"import ctypes; ctypes.CDLL({str(library)!r}).{function}({value})"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=sanitize_native.environment(find_compiler() or ""),
        capture_output=True,
        text=True,
        check=False,
    )


@needs_compiler
@pytest.mark.parametrize(
    ("function", "right", "wrong", "said"),
    [
        ("write_at", 15, 16, "heap-buffer-overflow"),
        ("twice", 2**30 - 1, 2**30, "signed integer overflow"),
    ],
)
def test_a_mistake_ends_the_run(
    library: Path, function: str, right: int, wrong: int, said: str
) -> None:
    assert call(library, function, right).returncode == 0
    done = call(library, function, wrong)
    assert done.returncode != 0
    assert said in done.stderr


def test_without_a_compiler_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert sanitize_native.main([]) == 0
    assert capsys.readouterr().out == "sanitized tests are skipped: no C++ compiler\n"


@needs_compiler
def test_what_is_only_built_is_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []

    def build(wanted: Sequence[Target], say: object) -> bool:
        built.extend(target.path for target in wanted)
        return True

    monkeypatch.setattr(sanitize_native, "build", build)
    monkeypatch.setattr(sanitize_native, "environment", None)  # of the tests' process
    assert sanitize_native.main(["--build"]) == 0
    assert built
    assert all(path.is_relative_to(sanitize_native.FOLDER) for path in built)
