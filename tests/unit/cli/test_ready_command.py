from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from kvmesh.cli.flags import command_words
from kvmesh.cli.ready_command import command_problems, run_command, search_path
from kvmesh.core.errors import ConfigError
from tests.waiting import until


def test_words_are_a_shells() -> None:
    assert command_words("sh -c 'echo a b'") == ("sh", "-c", "echo a b")
    assert command_words("") == ()
    with pytest.raises(argparse.ArgumentTypeError, match="quotation"):
        command_words("sh -c 'echo")


def test_a_program_that_is_not_there_is_known_before() -> None:
    assert command_problems(()) == []
    assert command_problems(("sh", "-c", "true")) == []
    [problem] = command_problems(("kvmesh-of-nobody", "bench"))
    assert "kvmesh-of-nobody" in problem


def test_programs_of_this_environment_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert command_problems((Path(sys.executable).name,)) == []
    assert search_path().endswith(":/nowhere")


async def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    words = ("sh", "-c", f'echo "$KVMESH_URL" > {seen}; exit 3')
    assert await run_command(words, {"KVMESH_URL": "http://here"}) == 3
    assert seen.read_text() == "http://here\n"
    assert await run_command(("sh", "-c", "kill -KILL $$"), {}) == 137


async def test_a_cancelled_command_has_ended(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    script = f"trap 'touch {ended}; exit' TERM; touch {started}; while :; do sleep 0.05; done"
    running = asyncio.create_task(run_command(("sh", "-c", script), {}))
    await until(started.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.exists()


async def test_what_a_cancelled_command_had_started_ends_too(tmp_path: Path) -> None:
    started = tmp_path / "started"
    words = ("sh", "-c", f"sleep 600 & echo $! > {started}; wait; echo not the last command")
    running = asyncio.create_task(run_command(words, {}))
    await until(lambda: started.exists() and started.read_text())
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not psutil.pid_exists(int(started.read_text())))


async def test_a_command_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.cli.ready_command.GRACE_S", 0.05)
    started = tmp_path / "started"
    script = f"trap '' TERM; touch {started}; while :; do sleep 0.05; done"
    running = asyncio.create_task(run_command(("sh", "-c", script), {}))
    await until(started.exists)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("neither a script nor a binary")
    file.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot be run"):
        await run_command((str(file),), {})
