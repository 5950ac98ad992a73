"""Builds and loads `host.cpp`, once per machine and version; without a compiler there is none.

The library is kept in the user's cache under a name that follows from the source, the compiler
and the CPU. It has a C ABI, so it does not depend on torch's, and shares torch's OpenMP threads
because torch is loaded first. Tests: tests/unit/kernels/test_host.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("host.cpp")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=c++17", "-fno-math-errno")
_COMPILE_SECONDS = 120

_log = logging.getLogger(__name__)


@functools.cache
def load_host_library() -> ctypes.CDLL | None:
    """The compiled library, or None when it cannot be had; says so once, as a warning."""
    assert torch.get_num_threads() > 0, "torch's OpenMP is the one to share"
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        _log.warning("no C++ compiler: the CPU path runs on torch alone, which is slower")
        return None
    try:
        return ctypes.CDLL(str(build(compiler, Path.home() / ".cache" / "kvmesh")))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.warning("host.cpp cannot be built, the CPU path runs on torch alone: %s", error)
        return None


def build(compiler: str, folder: Path) -> Path:
    """Compiles into the folder unless it is there already.

    Raises:
        OSError: the folder cannot be written, or the compiler not be run.
        subprocess.SubprocessError: it refused or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"host-{_identity(compiler)}.so"
    if path.is_file():
        return path
    # Several workers may build at once: each makes its own file, the last rename wins.
    handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run(compiler, *_FLAGS, str(_SOURCE), "-o", made)
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _identity(compiler: str) -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(_SOURCE.read_bytes())
    digest.update(f"{_FLAGS} {_run(compiler, '--version')} {features}".encode())
    return digest.hexdigest()[:16]


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS
    )
    return done.stdout
