"""Signals to children of asyncio: they arrive, and the exit code stays the child's own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from kvmesh.core.children import ask_to_end, kill

ENDS_WELL = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
WAITS = "print(flush=True); signal.pause()"


async def start() -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDS_WELL + WAITS, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process


def wait_for_end(pid: int) -> None:
    """Waits until a process has ended, without reading its exit code."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_stopped_process_is_asked_to_end() -> None:
    process = await start()
    os.kill(process.pid, signal.SIGSTOP)
    ask_to_end(process)
    assert await process.wait() == 7


@pytest.mark.parametrize("send", [ask_to_end, kill])
async def test_the_exit_code_of_an_ended_process_is_its_own(
    send: Callable[[asyncio.subprocess.Process], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()

    def wait_late(pid: int, options: int) -> tuple[int, int]:
        sent.wait()
        return wait(pid, options)

    wait = os.waitpid
    # asyncio's watcher calls it: in a thread on Python 3.11, later on the event loop.
    monkeypatch.setattr(os, "waitpid", wait_late)
    process = await start()
    os.kill(process.pid, signal.SIGTERM)
    wait_for_end(process.pid)  # the event loop must not see it
    send(process)
    sent.set()
    assert await process.wait() == 7
    send(process)
