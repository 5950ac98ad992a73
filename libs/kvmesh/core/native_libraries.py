"""The C++ libraries of this package: their sources, their CPU levels, and loading them.

They are built once, by `make setup` or into a wheel (scripts/build_native.py), never by a serving
process. Each library has one file per instruction level, `_NAME_LEVEL.so`, beside the Python file
that loads it. The best level that this CPU can run is loaded. A library contains the digest of its
sources. If the sources beside it have changed since, it is not loaded, because its functions may
take other arguments. Tests: tests/unit/core/test_native_libraries.py.
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
    """An instruction level that a library may be compiled for.

    Attributes:
        name: part of file names.
        flags: compiler flags.
        needs: CPU flags that /proc/cpuinfo must list.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_V4_BF16 = ("-march=x86-64-v4", "-mavx512bf16")
_TILES = frozenset({"amx_tile", "amx_bf16"})
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18

LEVELS: dict[str, tuple[Level, ...]] = {
    "x86_64": (
        Level("amx", (*_V4_BF16, "-mamx-tile", "-mamx-bf16"), _V4 | _TILES | {"avx512_bf16"}),
        Level("avx512bf16", _V4_BF16, _V4 | {"avx512_bf16"}),
        Level("avx512", ("-march=x86-64-v4",), _V4),
        Level("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Level("neon", ("-march=armv8-a+crc",), frozenset({"asimd", "crc32"})),),
}
"""Levels of each machine type, best first."""


@dataclass(frozen=True)
class NativeLibrary:
    """A native library and how it is built.

    Attributes:
        name: prefix of its source files' names.
        folder: folder of its sources and libraries, relative to the package.
        units: sources that are compiled; all headers of the folder belong to the library too.
        flags: compiler flags besides those of the level.
    """

    name: str
    folder: str
    units: tuple[str, ...]
    flags: tuple[str, ...]

    def file_name(self, level: Level) -> str:
        """Returns the library's file name for a level."""
        return f"_{self.name}_{level.name}.so"

    def sources(self, package: Path = _PACKAGE) -> list[Path]:
        """Returns the units and headers; empty if there are none, as in a wheel."""
        folder = package / self.folder
        paths = [folder / unit for unit in self.units]
        return [*paths, *sorted(folder.glob("*.h"))] if all(map(Path.is_file, paths)) else []

    def digest(self, level: Level, package: Path = _PACKAGE) -> str:
        """Returns the digest of sources and flags that is stored in the library.

        The compiler is not part of it.
        """
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
    """A library cannot be loaded; the message says why and what to do."""


@dataclass(frozen=True)
class Loaded:
    """A loaded library, and the level that it was compiled for."""

    library: ctypes.CDLL
    level: str


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Returns the CPU's features by the kernel's names; empty if the kernel lists none.

    AMX's tiles are among them only if this process may use them.
    """
    if not _CPUINFO.is_file():
        return frozenset()
    for line in _CPUINFO.read_text(encoding="utf-8").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            found = frozenset(values.split())
            return found - _TILES if found >= _TILES and not _may_use_tiles() else found
    return frozenset()


def _may_use_tiles() -> bool:
    """Asks Linux for the registers of AMX, which a process has only on request."""
    libc = ctypes.CDLL(None)
    return int(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA)) == 0


def machine_levels() -> tuple[Level, ...]:
    """Returns the levels of this machine type, best first."""
    return LEVELS.get(platform.machine(), ()) if sys.platform == "linux" else ()


def usable_levels(flags: frozenset[str] | None = None) -> tuple[Level, ...]:
    """Returns the levels that this CPU can run, or a CPU with these flags; best first."""
    had = cpu_flags() if flags is None else flags
    return tuple(level for level in machine_levels() if level.needs <= had)


def find_library(
    wanted: NativeLibrary, level: str | None = None, package: Path = _PACKAGE
) -> tuple[Path, str]:
    """Returns the path of the best existing file of a library, and its level.

    Args:
        wanted: the library.
        level: the only level to accept; the CPU has to support it.
        package: parent of the libraries' folders.

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
    """Loads the file that `find_library` returns.

    Raises:
        NativeError: there is none, or the system cannot load it.
    """
    path, name = find_library(wanted, level, package)
    try:
        return Loaded(ctypes.CDLL(str(path)), name)
    except OSError as error:
        raise NativeError(f"{path.name} cannot be loaded: {error}") from error


def is_made_from(path: Path, digest: str) -> bool:
    """Whether the library contains this digest."""
    return digest.encode() in path.read_bytes()


def _no_level() -> str:
    kind = platform.machine()
    lacking = sorted(_V3 - cpu_flags()) if kind == "x86_64" else []
    why = f" (this CPU lacks {', '.join(lacking)})" if lacking else ""
    return f"no library is made for {kind} on {sys.platform}{why}"
