"""Processes that children of this one left behind, such as the compiler of a killed worker.

On Linux orphans go to the next ancestor that asked for them instead of to init, so this process
can find all its descendants, however their own parents ended.
Tests: tests/unit/cli/test_descendants.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Collection

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, where the kernel can (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kills everything that this process and its children started, and waits until it is gone."""
    me = psutil.Process()
    while left := me.children(recursive=True):  # those killed may have started more just before
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)
        reap_orphans(())


def reap_orphans(own: Collection[int]) -> None:
    """Takes ended orphans off the process table.

    Args:
        own: children for which somebody else waits.
    """
    for process in psutil.Process().children():
        if process.pid not in own:
            with contextlib.suppress(ChildProcessError, psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)
