"""Cores that this process may use: its affinity, and the CPU quotas of its control groups.

A container with a quota sees all cores of its host. Once its threads have used the quota up, Linux
stops them for the rest of the period (100 ms), and threads that compute together wait for the
stopped ones. Tests: tests/unit/core/test_cores.py.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNBOUNDED = ("max", "-1")


def usable_cores() -> int:
    """Returns the number of cores that this process may keep busy, at least 1."""
    seen = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return whole_cores(seen, cpu_quota())


def whole_cores(seen: int, quota: float) -> int:
    """Returns the cores within a quota, rounded down: one thread too many would stop them all."""
    return max(1, int(min(seen, quota)))


def cpu_quota(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float:
    """Returns the CPU quota of this process's control groups in cores; infinite without a quota.

    Args:
        groups: mount point of the control groups; version 1 has a folder per controller below it.
        membership: the process's groups, as in /proc/self/cgroup (cgroups(7)).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no Linux
        return math.inf
    quotas = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            quotas += [_read(folder, "cpu.max") for folder in _folders(groups, path)]
        elif "cpu" in controllers.split(","):
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quotas += [_read(folder, *files) for folder in _folders(groups / "cpu", path)]
    return min(quotas)


def _folders(mount: Path, path: str) -> list[Path]:
    """Returns the folders of a group and of its parents, each of which has its own quota.

    Inside a container the parents' folders do not exist, and the mount point is its own group.
    """
    parts = PurePosixPath(path).parts[1:]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _read(folder: Path, *names: str) -> float:
    try:
        return quota_of(" ".join((folder / name).read_text() for name in names))
    except (OSError, ValueError):
        return math.inf


def quota_of(text: str) -> float:
    """Returns a quota in cores, from microseconds per period: `150000 100000` is 1.5.

    Raises:
        ValueError: the text is no quota.
    """
    allowed, period = text.split()
    return math.inf if allowed in _UNBOUNDED else int(allowed) / int(period)
