"""Which library is taken, and which is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.core import native_libraries
from kvmesh.core.native_libraries import (
    HOST,
    LIBRARIES,
    NativeError,
    NativeLibrary,
    find_library,
    load_library,
    usable_levels,
)
from tests.native import needs_compiler

ZEN2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
SKYLAKE_X = ZEN2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
ZEN4 = SKYLAKE_X | {"avx512_bf16"}
SAPPHIRE_RAPIDS = ZEN4 | {"amx_tile", "amx_bf16"}
SMALL = NativeLibrary("small", "tools", ("small.cpp",), ("-O2",))


@pytest.fixture(autouse=True)
def _x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(native_libraries, "cpu_flags", lambda: ZEN4)


def put(package: Path, level: str, digest: str = "") -> Path:
    path = package / SMALL.folder / f"_small_{level}.so"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x7fELF " + digest.encode() + b"\0")
    return path


def put_sources(package: Path) -> None:
    (package / SMALL.folder).mkdir(exist_ok=True)
    (package / SMALL.folder / "small.cpp").write_text("int small;")
    (package / SMALL.folder / "small.h").write_text("")


def digest_of(level: str, package: Path) -> str:
    [found] = [each for each in usable_levels() if each.name == level]
    return SMALL.digest(found, package)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (SAPPHIRE_RAPIDS, ["amx", "avx512bf16", "avx512", "avx2"]),
        (ZEN4, ["avx512bf16", "avx512", "avx2"]),
        (SKYLAKE_X, ["avx512", "avx2"]),
        (ZEN2, ["avx2"]),
        (ZEN2 - {"fma"}, []),
        (frozenset(), []),
    ],
)
def test_levels_of_a_cpu(flags: frozenset[str], names: list[str]) -> None:
    assert [level.name for level in usable_levels(flags)] == names


@pytest.mark.parametrize("permitted", [True, False])
def test_tiles_are_used_if_the_kernel_permits_it(
    permitted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor: 0\nflags\t: {' '.join(SAPPHIRE_RAPIDS)}\n")
    monkeypatch.setattr(native_libraries, "_CPUINFO", path)
    monkeypatch.setattr(native_libraries, "_may_use_tiles", lambda: permitted)
    native_libraries.cpu_flags.cache_clear()
    try:
        assert native_libraries.cpu_flags() == (SAPPHIRE_RAPIDS if permitted else ZEN4)
    finally:
        native_libraries.cpu_flags.cache_clear()


def test_arm_has_a_level_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [level.name for level in usable_levels(frozenset({"asimd", "crc32"}))] == ["neon"]
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert usable_levels() == ()


def test_the_best_that_is_there(tmp_path: Path) -> None:
    low, high = put(tmp_path, "avx2"), put(tmp_path, "avx512")
    assert find_library(SMALL, package=tmp_path) == (high, "avx512")
    assert find_library(SMALL, level="avx2", package=tmp_path) == (low, "avx2")


def test_what_the_cpu_lacks_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "avx512")
    monkeypatch.setattr(native_libraries, "cpu_flags", lambda: ZEN2)
    with pytest.raises(NativeError, match=r"_small_avx2\.so is missing: install g\+\+, then `make"):
        find_library(SMALL, package=tmp_path)
    monkeypatch.setattr(native_libraries, "cpu_flags", lambda: ZEN2 - {"fma"})
    with pytest.raises(NativeError, match="this CPU lacks fma"):
        find_library(SMALL, package=tmp_path)


@pytest.mark.parametrize("changed", ["small.cpp", "small.h"])
def test_one_that_is_older_than_its_sources_is_not_taken(tmp_path: Path, changed: str) -> None:
    put_sources(tmp_path)
    path = put(tmp_path, "avx2", digest_of("avx2", tmp_path))
    assert find_library(SMALL, package=tmp_path) == (path, "avx2")
    (tmp_path / SMALL.folder / changed).write_text("int larger;")
    with pytest.raises(NativeError, match=r"_small_avx2\.so is older than its sources: run `make"):
        find_library(SMALL, package=tmp_path)


def test_flags_are_a_part_of_what_it_is_made_from(tmp_path: Path) -> None:
    put_sources(tmp_path)
    assert digest_of("avx2", tmp_path) != digest_of("avx512", tmp_path)


def test_what_is_no_library_is_an_error_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, "avx2")
    with pytest.raises(NativeError, match=r"_small_avx2\.so cannot be loaded: .*too short"):
        load_library(SMALL, package=tmp_path)


def test_sources_of_all_libraries_are_there() -> None:
    assert {path.name for path in HOST.sources()} >= {"host_f32.cpp", "host_bf16.cpp", "decode.h"}
    assert all(library.sources() for library in LIBRARIES)


@needs_compiler
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_where_a_compiler_is_the_best_is_built(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    if not usable_levels():
        pytest.skip("no library is made for this CPU")
    assert find_library(library)[1] == usable_levels()[0].name
