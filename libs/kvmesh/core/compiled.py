"""Compiles a C++ file of this package into a library, once per machine and version.

The library is kept in the user's cache under a name that follows from the source and the headers
beside it, the compiler, its flags and the CPU; of one source the last few that were used stay.
Where that cannot be written, as in a pod whose file system is read-only, it is kept beside
temporary files. Tests: tests/unit/core/test_compiled.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvmesh.core.own_folder import own_temporary_folder

_COMPILE_SECONDS = 120

KEPT = 8
"""Libraries of one source: those of a few versions, or builds with other flags, side by side."""

_PART = ".part"


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
        return _loaded(compiler, source, flags)
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{error}: {error.stderr}") from error
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise CompileError(str(error)) from error


def _loaded(compiler: str, source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    path = _library(compiler, source, flags)
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        if path.exists():
            raise
    # Another process that made room took it for one that is not used any more.
    return ctypes.CDLL(str(_library(compiler, source, flags)))


def _library(compiler: str, source: Path, flags: Sequence[str]) -> Path:
    try:
        return compile_library(compiler, source, flags, Path.home() / ".cache" / "kvmesh")
    except (OSError, RuntimeError):  # not to be written, or no home at all
        folder = own_temporary_folder()
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise PermissionError(f"{folder} is on a file system without programs") from None
        return compile_library(compiler, source, flags, folder)


def compile_library(compiler: str, source: Path, flags: Sequence[str], folder: Path) -> Path:
    """Compiles into the folder unless it is there already; returns the library's path.

    Raises:
        OSError: the folder cannot be written, or the compiler not be run.
        subprocess.SubprocessError: it refused or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{source.stem}-{_identity(compiler, source, flags)}.so"
    if path.is_file():
        with contextlib.suppress(OSError):  # gone by now, or not to be written
            os.utime(path)  # used last
        return path
    # Several workers may build at once: each makes its own file, the last rename wins.
    handle, made = tempfile.mkstemp(_PART, f"{source.stem}-", folder)
    os.close(handle)
    try:
        _run(compiler, *flags, str(source), "-o", made)
        os.replace(made, path)
    finally:
        Path(made).unlink(missing_ok=True)
    _make_room(folder, source.stem)
    return path


def _make_room(folder: Path, stem: str) -> None:
    """Removes libraries of a source that were used longest ago, and what killed builds left.

    Who has loaded one keeps it: its file goes when the last of them ends.
    """
    with contextlib.suppress(OSError):  # two at once: what is gone need not be removed
        built = sorted(folder.glob(f"{stem}-*.so"), key=_used_at, reverse=True)
        too_late = time.time() - 2 * _COMPILE_SECONDS
        left = [each for each in folder.glob(f"{stem}-*{_PART}") if _used_at(each) < too_late]
        for path in (*built[KEPT:], *left):
            path.unlink(missing_ok=True)


def _used_at(path: Path) -> float:
    return path.stat().st_mtime


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
