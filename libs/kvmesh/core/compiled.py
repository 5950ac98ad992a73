"""Compiles a C++ file of this package into a library, once per machine and version.

The library is kept in the user's cache under a name that follows from the source and the headers
beside it, the compiler, its flags and the CPU. Where that cannot be written, as in a pod whose file
system is read-only, it is kept beside temporary files. Tests: tests/unit/core/test_compiled.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_COMPILE_SECONDS = 120


class CompileError(Exception):
    """There is no compiler, or it refused, or its product cannot be loaded."""


def find_compiler() -> str | None:
    """Path of the C++ compiler; None without one."""
    return shutil.which("c++") or shutil.which("g++")


def load_compiled(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """The library made from `source`, compiled now if it is not in the cache.

    Raises:
        CompileError: it cannot be had; the message says why.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError("no C++ compiler")
    try:
        return ctypes.CDLL(str(_library(compiler, source, flags)))
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{error}: {error.stderr}") from error
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise CompileError(str(error)) from error


def _library(compiler: str, source: Path, flags: Sequence[str]) -> Path:
    try:
        return compile_library(compiler, source, flags, Path.home() / ".cache" / "kvmesh")
    except (OSError, RuntimeError):  # not to be written, or no home at all
        return compile_library(compiler, source, flags, _own_temporary_folder())


def _own_temporary_folder() -> Path:
    """A folder that outlives this process and that nobody else writes: code is loaded from it.

    Raises:
        OSError: there is none, or somebody else was first, or no code may be loaded from there.
    """
    folder = Path(tempfile.gettempdir()) / f"kvmesh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} is not this user's alone")
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise PermissionError(f"{folder} is on a file system without programs")
    return folder


def compile_library(compiler: str, source: Path, flags: Sequence[str], folder: Path) -> Path:
    """Compiles into the folder unless it is there already; returns the library's path.

    Raises:
        OSError: the folder cannot be written, or the compiler not be run.
        subprocess.SubprocessError: it refused or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{source.stem}-{_identity(compiler, source, flags)}.so"
    if path.is_file():
        return path
    # Several workers may build at once: each makes its own file, the last rename wins.
    handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        _run(compiler, *flags, str(source), "-o", made)
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    return path


def _identity(compiler: str, source: Path, flags: Sequence[str]) -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.is_file() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    digest.update(f"{tuple(flags)} {_run(compiler, '--version')} {features}".encode())
    return digest.hexdigest()[:16]


def _run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS
    )
    return done.stdout
