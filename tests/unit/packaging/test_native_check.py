"""The check of the C++ libraries that runs without Python, on this machine's own instructions."""

from __future__ import annotations

import shutil

import pytest

from kvmesh.core.native_libraries import usable_levels
from scripts import test_arm as native_check

HAS_AVX2 = any(level.name == "avx2" for level in usable_levels())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_AVX2 or shutil.which("g++") is None, reason="needs g++ and AVX2")
def test_the_check_passes_where_its_program_runs(capfd: pytest.CaptureFixture[str]) -> None:
    here = ["--compiler", "g++", "--machine", "x86_64", "--level", "avx2", "--emulator", ""]
    assert native_check.main(here) == 0
    out = capfd.readouterr().out
    assert "ok   attention of prompts" in out
    assert "FAIL" not in out


def test_a_compiler_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert native_check.main(["--compiler", "no-such-g++", "--emulator", ""]) == 1
    assert "no-such-g++: not found; apt install" in capsys.readouterr().err
