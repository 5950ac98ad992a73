from __future__ import annotations

import subprocess
from pathlib import Path

from kvmesh.cli.bench_report import command_line, git_commit, machine, versions


def test_the_machine_is_described() -> None:
    described = machine()
    assert described["cores"] >= 1
    assert described["processor"]


def test_versions_name_what_is_installed() -> None:
    found = versions()
    assert {"python", "grpcio"} <= set(found)


def test_the_commit(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == ""
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@localhost")
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "first"], cwd=tmp_path, check=True)
    clean = git_commit(tmp_path)
    assert len(clean) == 12
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{clean}-dirty"
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    (results / "serve.json").write_text("1")
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-qm", "second"], cwd=tmp_path, check=True)
    (results / "serve.json").write_text("2")
    assert len(git_commit(tmp_path)) == 12


def test_a_command_names_no_folder_of_the_machine() -> None:
    shown = command_line(["python", "-m", "bench"], ["--rate", "4", "--trace", "/data/a b.gz"])
    assert shown == "python -m bench --rate 4 --trace '.../a b.gz'"
    shown = command_line(["bench"], ["--peers", "vllm=/opt/v/bin/python", "--seed=4", "a=b/c"])
    assert shown == "bench --peers vllm=.../python --seed=4 a=b/c"
