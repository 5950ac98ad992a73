"""The command of `kvmesh up --run`: finds its program, runs it and ends it.

Tests: tests/unit/cli/test_ready_command.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from kvmesh.cli.processes import die_with_parent
from kvmesh.core.config import child_environment, environment
from kvmesh.core.errors import ConfigError

GRACE_S = 5.0


def search_path() -> str:
    """Returns PATH with this Python's folder first, so that `kvmesh` and `python` are its own."""
    return os.pathsep.join((str(Path(sys.executable).parent), environment("PATH")))


def command_problems(words: Sequence[str]) -> list[str]:
    """Returns the reasons why the command cannot run, before a stack is started for it."""
    if not words or shutil.which(words[0], path=search_path()):
        return []
    return [f"--run: there is no program {words[0]}; a shell's command is --run 'sh -c \"...\"'"]


async def run_command(words: Sequence[str], extra: Mapping[str, str]) -> int:
    """Runs the command to its end. When cancelled, ends the command and its descendants.

    The command stays in the foreground process group, so that for example `kvmesh chat` can read
    from the terminal. On Linux it ends when this process dies.

    Args:
        extra: environment variables in addition to those of this process.

    Returns:
        Its exit code; 128 plus the signal's number if a signal ended it, as in shells.

    Raises:
        ConfigError: the program cannot be run.
    """
    env = child_environment({**extra, "PATH": search_path()})
    try:
        process = await asyncio.create_subprocess_exec(
            *words, env=env, preexec_fn=die_with_parent()
        )
    except OSError as error:
        raise ConfigError(f"--run: {words[0]} cannot be run: {error.strerror}") from error
    try:
        code = await process.wait()
        return code if code >= 0 else 128 - code
    finally:
        if process.returncode is None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Asks the command and its descendants to end, and kills them after `GRACE_S`."""
    everyone = [psutil.Process(process.pid)]
    with contextlib.suppress(psutil.NoSuchProcess):
        everyone += everyone[0].children(recursive=True)
    for each in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    try:
        async with asyncio.timeout(GRACE_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        for each in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        await process.wait()
