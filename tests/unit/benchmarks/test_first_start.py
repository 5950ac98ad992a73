from __future__ import annotations

import subprocess
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks.first_start import start_row
from benchmarks.start_sandbox import MARK, Leftovers, Sandbox, Start, StartError, marked_processes

MAKEFILE = """\
up:
\t@mkdir -p .kvmesh && touch .kvmesh/lock
\t@{command}
"""


def sandbox_with(folder: Path, command: str) -> Sandbox:
    """A clone whose `make up` is one command."""
    source = folder / "source"
    source.mkdir()
    (source / "Makefile").write_text(MAKEFILE.format(command=command))
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=source, check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, "commit", "-qm", "x"], cwd=source, check=True)
    return Sandbox.clone(source, folder)


def test_processes_are_found_by_the_mark_in_their_environment() -> None:
    environment = {MARK: "this one", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen("cat", env=environment, stdin=PIPE, stdout=PIPE, bufsize=0) as child:
        # The kernel shows an empty environment for the first moments of a new program.
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"ready\n")
        assert child.stdout.readline() == b"ready\n"
        assert [pid for pid, _ in marked_processes("this one")] == [child.pid]
        assert marked_processes("another") == []
    assert marked_processes("this one") == []


def test_what_a_start_leaves_behind_is_told(tmp_path: Path) -> None:
    sandbox = sandbox_with(tmp_path, "setsid sleep 60 & touch $$TMPDIR/half; sleep 60")
    with sandbox.make_up(None) as running:
        running.wait(0.5)
        running.interrupt(10.0)
        left = sandbox.leftovers()
    assert left == Leftovers(("sleep 60",), ("tmp/half",))
    assert sandbox.leftovers().processes == (), "the block's end kills them"


def test_a_start_that_cleans_up_leaves_nothing(tmp_path: Path) -> None:
    sandbox = sandbox_with(tmp_path, "sleep 60")
    with sandbox.make_up({0}) as running:
        assert running.wait(0.5) == "starting"
        running.interrupt(10.0)
    assert str(sandbox.leftovers()) == "nothing"


def test_a_start_that_fails_is_told_with_its_output(tmp_path: Path) -> None:
    sandbox = sandbox_with(tmp_path, "echo no memory; exit 3")
    with (
        sandbox.make_up(None) as running,
        pytest.raises(StartError, match=r"ended with 2:\n.*no memory"),
    ):
        running.wait_until_served(10.0)


def test_a_start_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    sandbox = sandbox_with(tmp_path, "sleep 60")
    with sandbox.make_up(None) as running, pytest.raises(StartError, match="not ready after"):
        running.wait_until_served(0.3)


def test_a_row_tells_sizes_and_times(tmp_path: Path) -> None:
    sandbox = sandbox_with(tmp_path, "true")
    package = sandbox.clone_folder / ".venv/lib/python3.11/site-packages/a-1.dist-info"
    package.mkdir(parents=True)
    row = start_row("first", Start(1.0, 2.0, 2.5), sandbox, 0.25, Leftovers())
    assert row["packages"] == 1
    assert (row["ready s"], row["first token s"], row["left"]) == (2.0, 2.5, "nothing")
    assert sandbox.environment()["HOME"] == str(sandbox.home)
