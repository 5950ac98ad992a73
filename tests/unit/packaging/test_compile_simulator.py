from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import compile_simulator
from scripts.compile_simulator import LIBS, MODULES, compare, copy_sources, identity, is_ours


@pytest.mark.parametrize("module", MODULES)
def test_classes_become_native_ones(module: str) -> None:
    """One with a decorator that the compiler does not know would stay slow, without a word."""
    tree = ast.parse((LIBS / module).read_text())
    for each in ast.walk(tree):
        if isinstance(each, ast.ClassDef):
            for decorator in each.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                assert isinstance(called, ast.Name), f"{module}: {each.name}"
                assert called.id == "dataclass", f"{module}: {each.name}"


def test_a_source_that_changed_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("X = 1\n")
    before = identity(tmp_path)
    assert identity(tmp_path) == before
    (tmp_path / "a.py").write_text("X = 2\n")
    assert identity(tmp_path) != before


def test_what_cannot_be_compiled_is_left_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    libs, folder = tmp_path / "libs", tmp_path / "compiled"
    libs.mkdir()
    (libs / "broken.py").write_text("def f() -> int:\n    return 'no number'\n")
    copy_sources(libs, folder)
    monkeypatch.setattr(compile_simulator, "LIBS", libs)
    monkeypatch.setattr(compile_simulator, "MODULES", ("broken.py",))
    assert compile_simulator.main([str(folder)]) == 0
    assert "not compiled" in capsys.readouterr().err
    assert (folder / "broken.py").is_file()
    assert not list(folder.glob("*.so"))
    assert (folder / "compiled.sha256").read_text() != identity(libs), "it is tried again"
    assert is_ours(folder)


def test_a_folder_with_something_else_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_simulator, "compile_modules", lambda _: "not tried")
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    for target in (tmp_path, mine):
        assert compile_simulator.main([str(target)]) == 2
        assert "something else" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [mine]


def test_one_that_decides_otherwise_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_simulator, "_EXAMPLE", ("example",))
    for name, decision in (("plain", 1), ("same", 1), ("other", 2)):
        folder = tmp_path / name
        folder.mkdir()
        wanted = f"import sys\nopen(sys.argv[2], 'w').write('{decision}')\n"
        (folder / "example.py").write_text(wanted)
    assert compare(tmp_path / "plain", tmp_path / "same") == ""
    assert "otherwise" in compare(tmp_path / "plain", tmp_path / "other")
    (tmp_path / "other" / "example.py").write_text("raise SystemExit('broken')\n")
    assert "broken" in compare(tmp_path / "plain", tmp_path / "other")
