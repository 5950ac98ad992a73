"""The machine as one with AVX2 alone, in a process of its own: libraries read their environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import older_cpu
from kvmesh.core.native_libraries import HOST, NativeError, find_library

ASK = """
from benchmarks.older_cpu import use_avx2
use_avx2("none", [])
import torch
from kvmesh.kernels.host_library import load_host_library
print(load_host_library().level, torch.backends.cpu.get_cpu_capability())
"""


def _has_it() -> bool:
    try:
        return bool(find_library(HOST, level="avx2"))
    except NativeError:
        return False


@pytest.mark.skipif(not _has_it(), reason="no library for AVX2: install g++, then `make setup`")
def test_torch_and_our_kernels_have_no_more_than_avx2() -> None:
    told = {**os.environ, **older_cpu._ENVIRONMENT}
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["avx2", "AVX2"]


def test_a_process_whose_libraries_were_not_told_starts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[list[str]] = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> None:
        assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
        started.append(command[1:])
        raise SystemExit

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    with pytest.raises(SystemExit):
        older_cpu.use_avx2("benchmarks.engine", ["--avx2"])
    assert started == [["-m", "benchmarks.engine", "--avx2"]]
