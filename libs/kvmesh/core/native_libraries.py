"""The C++ libraries of this package: what they are made of, for which CPUs, and loading them.

They are built once, by `make setup` or into a wheel (scripts/build_native.py), never by a process
that serves. Of each there is one file for every level of instructions, beside the Python file that
loads it: `_NAME_LEVEL.so`. The best that this CPU can run is taken. A library carries the digest of
what it was made from; where sources lie beside it that have changed since, it is not loaded: its
functions may take other arguments by now. Tests: tests/unit/core/test_native_libraries.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Level:
    """Instructions that a library may use.

    Attributes:
        name: part of file names.
        flags: for the compiler.
        needs: what /proc/cpuinfo must list.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
        Level("avx512", ("-march=x86-64-v4",), _V4),
        Level("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Level("neon", ("-march=armv8-a+crc",), frozenset({"asimd", "crc32"})),),
}
"""By machine, the best first."""


@dataclass(frozen=True)
class NativeLibrary:
    """One library.

    Attributes:
        name: with which its sources begin.
        folder: where sources and libraries lie, from the package on.
        units: sources that are compiled by themselves; headers are all of the folder.
        flags: for the compiler, beside those of a level.
    """

    name: str
    folder: str
    units: tuple[str, ...]
    flags: tuple[str, ...]

    def file_name(self, level: Level) -> str:
        """Of the library for that level."""
        return f"_{self.name}_{level.name}.so"

    def sources(self, package: Path = _PACKAGE) -> list[Path]:
        """Units and headers; empty where none are, as in a wheel."""
        folder = package / self.folder
        paths = [folder / unit for unit in self.units]
        return [*paths, *sorted(folder.glob("*.h"))] if all(map(Path.is_file, paths)) else []

    def digest(self, level: Level, package: Path = _PACKAGE) -> str:
        """Of all that decides what is in the library but for the compiler; the library holds it."""
        digest = hashlib.sha256(repr((self.flags, level.flags)).encode())
        for path in self.sources(package):
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
        return digest.hexdigest()


_COMMON = ("-O3", "-std=c++17", "-fPIC", "-Wall", "-Wextra")

HOST = NativeLibrary(
    *("host", "kernels", ("host_f32.cpp", "host_bf16.cpp")),
    flags=(*_COMMON, "-fno-math-errno", "-fopenmp"),
)
"""Kernels of the CPU engine."""

TRANSFER = NativeLibrary("native", "transfer", ("native.cpp",), (*_COMMON, "-pthread"))
"""Copies and socket transfers of the data channel."""

LIBRARIES = (HOST, TRANSFER)


class NativeError(Exception):
    """A library is not to be had; the message says why and what to do."""


@dataclass(frozen=True)
class Loaded:
    """A library in this process, and the level it was made for."""

    library: ctypes.CDLL
    level: str


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What the CPU can do, by the kernel's names; empty where it does not say."""
    if not _CPUINFO.is_file():
        return frozenset()
    for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(values.split())
    return frozenset()


def machine_levels() -> tuple[Level, ...]:
    """Levels of machines of this kind, the best first."""
    return LEVELS.get(platform.machine(), ()) if sys.platform == "linux" else ()


def usable_levels(flags: frozenset[str] | None = None) -> tuple[Level, ...]:
    """Levels that this CPU can run, the best first; or one with these flags."""
    had = cpu_flags() if flags is None else flags
    return tuple(level for level in machine_levels() if level.needs <= had)


def find_library(
    wanted: NativeLibrary, level: str | None = None, package: Path = _PACKAGE
) -> tuple[Path, str]:
    """The best library of those that are there, and its level.

    Args:
        wanted: which one.
        level: this one alone; the CPU has to have it.
        package: where folders of libraries lie.

    Raises:
        NativeError: there is none for this CPU, or it is older than its sources.
    """
    levels = [each for each in usable_levels() if level in {None, each.name}]
    if not levels:
        raise NativeError(_no_level())
    has_sources, older = bool(wanted.sources(package)), None
    for each in levels:
        path = package / wanted.folder / wanted.file_name(each)
        if not path.is_file():
            continue
        if not has_sources or is_made_from(path, wanted.digest(each, package)):
            return path, each.name
        older = path
    if older is not None:
        raise NativeError(f"{older.name} is older than its sources: run `make setup`")
    raise NativeError(f"{wanted.file_name(levels[0])} is missing: install g++, then `make setup`")


def load_library(
    wanted: NativeLibrary, level: str | None = None, package: Path = _PACKAGE
) -> Loaded:
    """Loads what `find_library` finds.

    Raises:
        NativeError: it finds none, or the system cannot load it.
    """
    path, name = find_library(wanted, level, package)
    try:
        return Loaded(ctypes.CDLL(str(path)), name)
    except OSError as error:
        raise NativeError(f"{path.name} cannot be loaded: {error}") from error


def is_made_from(path: Path, digest: str) -> bool:
    """Whether the library holds this digest."""
    return digest.encode() in path.read_bytes()


def _no_level() -> str:
    kind = platform.machine()
    lacking = sorted(_V3 - cpu_flags()) if kind == "x86_64" else []
    why = f" (this CPU lacks {', '.join(lacking)})" if lacking else ""
    return f"no library is made for {kind} on {sys.platform}{why}"
