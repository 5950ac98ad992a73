"""Compiling a source file of the package."""

import shutil
from pathlib import Path

import pytest

from kvmesh.core.compiled import CompileError, compile_library, load_compiled

FLAGS = ("-O1", "-fPIC", "-shared")


@pytest.fixture
def compiler() -> str:
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        pytest.skip("needs a C++ compiler")
    return found


def source(folder: Path, text: str) -> Path:
    path = folder / "answer.cpp"
    path.write_text(text)
    return path


def test_one_build_serves_all_and_another_source_or_flag_is_another(
    compiler: str, tmp_path: Path
) -> None:
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    first = compile_library(compiler, path, FLAGS, tmp_path)
    made = first.stat().st_mtime_ns
    assert compile_library(compiler, path, FLAGS, tmp_path) == first
    assert first.stat().st_mtime_ns == made
    assert compile_library(compiler, path, (*FLAGS, "-O2"), tmp_path) != first
    source(tmp_path, 'extern "C" int answer() { return 43; }')
    second = compile_library(compiler, path, FLAGS, tmp_path)
    assert second != first
    (tmp_path / "answer.h").write_text("// Read by the source, or so it must be taken.")
    assert compile_library(compiler, path, FLAGS, tmp_path) not in {first, second}


def test_the_library_is_loaded_from_the_users_cache(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    assert load_compiled(path, FLAGS).answer() == 42
    assert [file.suffix for file in (tmp_path / ".cache" / "kvmesh").iterdir()] == [".so"]


def test_a_source_that_does_not_compile_says_why_and_leaves_nothing(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CompileError, match="error:"):
        load_compiled(source(tmp_path, "nonsense"), FLAGS)
    assert list((tmp_path / ".cache" / "kvmesh").iterdir()) == []


def test_without_a_compiler_there_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="no C\\+\\+ compiler"):
        load_compiled(source(tmp_path, ""), FLAGS)
