"""Ends processes that children of this one left behind, such as the compiler of a killed worker.

On Linux this process becomes a subreaper: it adopts orphaned descendants instead of init, so it
finds all of them, however their parents ended.
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
    """Makes orphaned descendants children of this process (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kills all descendants of this process, and waits until they are gone."""
    me = psutil.Process()
    while left := me.children(recursive=True):  # killed ones may have just started others
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)
        reap_orphans(())


def reap_orphans(own: Collection[int]) -> None:
    """Removes ended orphans from the process table.

    Args:
        own: process ids of children that other code waits for.
    """
    for process in psutil.Process().children():
        if process.pid not in own:
            with contextlib.suppress(ChildProcessError, psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)
