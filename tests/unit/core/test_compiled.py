"""Compiling a source file of the package."""

import ctypes
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from kvmesh.core.compiled import KEPT, CompileError, compile_library, load_compiled

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
    made = first.stat().st_ino
    assert compile_library(compiler, path, FLAGS, tmp_path) == first
    assert first.stat().st_ino == made
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


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library goes for a user whose home is a file, in which no cache can be made."""
    home = tmp_path / "home"
    home.write_text("")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"kvmesh-{os.getuid()}"


def test_without_a_cache_the_library_is_kept_beside_temporary_files(
    compiler: str, tmp_path: Path, temporary: Path
) -> None:
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    assert load_compiled(path, FLAGS).answer() == 42
    (made,) = temporary.iterdir()
    assert temporary.stat().st_mode & 0o777 == 0o700
    before = made.stat().st_ino
    assert load_compiled(path, FLAGS).answer() == 42
    assert made.stat().st_ino == before


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_of_one_source_the_libraries_that_were_used_last_stay(
    compiler: str, tmp_path: Path
) -> None:
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    used = compile_library(compiler, path, FLAGS, tmp_path)
    age(used, 1000)
    others = [tmp_path / f"answer-{number:016x}.so" for number in range(KEPT)]
    for number, other in enumerate(others):
        other.touch()
        age(other, 100 + number)
    of_another = tmp_path / "question-0.so"
    of_another.touch()
    killed, under_way = tmp_path / "answer-killed.part", tmp_path / "answer-now.part"
    for each in (killed, under_way):
        each.touch()
    age(killed, 3600)
    assert compile_library(compiler, path, FLAGS, tmp_path) == used, "makes it young again"
    made = compile_library(compiler, path, (*FLAGS, "-O2"), tmp_path)
    assert {*tmp_path.glob("answer-*")} == {used, made, under_way, *others[: KEPT - 2]}
    assert of_another.exists()


def test_a_library_that_another_process_removes_is_made_again(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = source(tmp_path, 'extern "C" int answer() { return 42; }')
    load = ctypes.CDLL
    calls: list[str] = []

    def after_it_is_gone(name: str) -> ctypes.CDLL:
        if not calls:
            Path(name).unlink()
        calls.append(name)
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", after_it_is_gone)
    assert load_compiled(path, FLAGS).answer() == 42
    assert len(calls) == 2


def test_no_code_is_loaded_from_a_folder_that_others_enter(
    compiler: str, tmp_path: Path, temporary: Path
) -> None:
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(CompileError, match="not this user's alone"):
        load_compiled(source(tmp_path, 'extern "C" int answer() { return 42; }'), FLAGS)


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
