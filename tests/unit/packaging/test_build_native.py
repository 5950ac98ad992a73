"""Building the C++ libraries: once, alone, and nothing is left of what was cut short."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvmesh.core.native_libraries import NativeLibrary, usable_levels
from scripts import build_native
from tests.native import needs_compiler
from tests.unit.packaging.compose_file import ROOT
from tests.waiting import until

SMALL = NativeLibrary("small", "tools", ("one.cpp", "two.cpp"), ("-O1", "-fPIC"))
needs_level = pytest.mark.skipif(not usable_levels(), reason="no library is made for this CPU")
pytestmark = needs_level

# The builder in a process of its own, with other folders.
PROGRAM = """
import sys
from pathlib import Path
from scripts import build_native
from kvmesh.core.native_libraries import NativeLibrary
SMALL = NativeLibrary("small", "tools", ("one.cpp", "two.cpp"), ("-O1", "-fPIC"))
package = build_native._PACKAGE = Path(sys.argv[1])
build_native._WORK = package / "work"
build_native.LIBRARIES = (SMALL,)
sys.exit(build_native.main([]))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / SMALL.folder
    folder.mkdir()
    (folder / "number.h").write_text("int number();\n")
    (folder / "one.cpp").write_text('#include "number.h"\nint number() { return 42; }\n')
    (folder / "two.cpp").write_text(
        '#include "number.h"\nextern "C" int answer() { return number(); }\n'
    )
    monkeypatch.setattr(build_native, "_PACKAGE", tmp_path)
    monkeypatch.setattr(build_native, "_WORK", tmp_path / "work")
    monkeypatch.setattr(build_native, "LIBRARIES", (SMALL,))
    return tmp_path


def build(package: Path) -> list[str]:
    """What is said."""
    said: list[str] = []
    assert build_native.build(build_native.targets(package, usable_levels()[:1]), said.append)
    return said


def leftovers(package: Path) -> list[Path]:
    return list(package.rglob("*part*"))


def built(package: Path) -> Path:
    return package / SMALL.folder / SMALL.file_name(usable_levels()[0])


@needs_compiler
def test_only_what_has_changed_is_built_again(package: Path) -> None:
    said = build(package)
    assert said[0] == "building native kernels, 0 s: part 1 of 2"
    assert said[-1].startswith("native kernels built in ")
    assert ctypes.CDLL(str(built(package))).answer() == 42
    assert build(package) == []
    (package / SMALL.folder / "number.h").write_text("int number(); // more\n")
    assert len(build(package)) == 3
    objects = len(list((package / "work").glob("*.o")))
    (package / SMALL.folder / "one.cpp").write_text("int number() { return 43; }\n")
    build(package)
    assert len(list((package / "work").glob("*.o"))) == objects + 1
    assert leftovers(package) == []


@needs_compiler
def test_what_the_compiler_refuses_is_told(package: Path) -> None:
    (package / SMALL.folder / "two.cpp").write_text("nonsense")
    with pytest.raises(build_native.BuildError, match="nonsense"):
        build(package)
    assert not built(package).exists()
    assert leftovers(package) == []


def test_without_a_compiler_nothing_is_built_and_that_is_said(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    said: list[str] = []
    wanted = build_native.targets(package, usable_levels()[:1])
    assert not build_native.build(wanted, said.append)
    assert "install g++" in said[0]
    assert len(said) == 1


@needs_compiler
def test_what_a_build_that_was_killed_left_is_removed(package: Path) -> None:
    left = package / "work" / "part-left"
    left.mkdir(parents=True)
    (left / "one.o").touch()
    build(package)
    assert not left.exists()


class Slow:
    """A compiler that begins and does not end, with a process of its own."""

    def __init__(self, package: Path) -> None:
        self.started = package / "started"
        tools = package / "bin"
        tools.mkdir()
        script = tools / "c++"
        script.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && exit\n'
            f"sleep 600 &\necho $$ $! >> {self.started}\nwait\n"
        )
        script.chmod(0o755)
        self.path = f"{tools}{os.pathsep}{os.environ['PATH']}"

    def pids(self) -> list[int]:
        text = self.started.read_text() if self.started.is_file() else ""
        return [int(pid) for line in text.splitlines(keepends=True) for pid in line.split()]

    def alive(self) -> list[int]:
        """Those that run: nobody may have waited for what has ended."""
        found = [psutil.Process(pid) for pid in self.pids() if psutil.pid_exists(pid)]
        return [each.pid for each in found if each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def slow(package: Path) -> Iterator[Slow]:
    made = Slow(package)
    yield made
    for pid in made.alive():
        os.kill(pid, signal.SIGKILL)


def start_build(package: Path, slow: Slow) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(package)],
        cwd=ROOT,
        env={**os.environ, "PATH": slow.path, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'libs'}"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_compilers_end_with_the_build(
    package: Path, slow: Slow, number: signal.Signals
) -> None:
    with start_build(package, slow) as process:
        await until(slow.pids)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert slow.alive() == []
    assert leftovers(package) == []


async def test_a_second_build_waits_for_the_first(package: Path, slow: Slow) -> None:
    with start_build(package, slow) as first:
        await until(slow.pids)
        compilers = slow.pids()
        with start_build(package, slow) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == (
                "another process builds native kernels; waiting for it\n"
            )
            second.terminate()
            second.wait(30)
        assert slow.pids()[: len(compilers)] == compilers
        first.terminate()
        first.wait(30)
