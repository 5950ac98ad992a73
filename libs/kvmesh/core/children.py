"""Signals to processes that this one has started with asyncio.

`asyncio.subprocess.Process.send_signal` polls the process first. If it has just ended, the poll
takes its exit code, and asyncio's own watcher, which finds it gone, reports 255 instead
(bugs.python.org/issue43944). So signals go by the process id here.
Tests: tests/unit/core/test_children.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal


def ask_to_end(process: asyncio.subprocess.Process) -> None:
    """Sends SIGTERM to a process, also if it is stopped; does nothing if it has ended."""
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process handles no signals
        _send(process, number)


def kill(process: asyncio.subprocess.Process) -> None:
    """Sends SIGKILL to a process; does nothing if it has ended."""
    _send(process, signal.SIGKILL)


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
