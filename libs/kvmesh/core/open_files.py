"""Limit of open files and sockets of this process.

Tests: tests/unit/core/test_open_files.py.
"""

from __future__ import annotations

import contextlib
import resource

_MOST = 1 << 20
"""Limit that is set where the system has none."""


def raise_open_files() -> None:
    """Raises the limit to the system's maximum; a common default of 1,024 is meant for shells.

    A scheduler needs two sockets for each worker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_open_files() -> int:
    """Returns the limit of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft
