"""Cores that this process may use: its affinity, and the CPU quotas of its control groups.

A container with a quota sees all cores of its host. Linux stops its threads for the rest of a
period (100 ms) once they have used the quota up, and threads that compute together then wait for
those that are stopped. Tests: tests/unit/core/test_cores.py.
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
    """Cores that this process may keep busy, at least 1."""
    seen = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return whole_cores(seen, cpu_quota())


def whole_cores(seen: int, quota: float) -> int:
    """Cores within a quota, rounded down: a thread more than it has time for stops all of them."""
    return max(1, int(min(seen, quota)))


def cpu_quota(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float:
    """Cores' worth of time that this process's control groups leave it; infinite without a quota.

    Args:
        groups: where control groups are mounted, those of version 1 below it by controller.
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
    """A group and those above it, each of which has its own quota.

    Those that a container does not see are not there: the mount is then its own group.
    """
    parts = PurePosixPath(path).parts[1:]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _read(folder: Path, *names: str) -> float:
    try:
        return quota_of(" ".join((folder / name).read_text() for name in names))
    except (OSError, ValueError):
        return math.inf


def quota_of(text: str) -> float:
    """A quota in cores, from microseconds per period: `150000 100000` is 1.5.

    Raises:
        ValueError: it is no quota.
    """
    allowed, period = text.split()
    return math.inf if allowed in _UNBOUNDED else int(allowed) / int(period)
