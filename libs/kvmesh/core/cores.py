"""Cores that this process may use: its affinity, and the CPU quotas of its control groups.

A container with a quota sees all cores of its host. Once its threads have used the quota up, Linux
stops them for the rest of the period (100 ms), and threads that compute together wait for the
stopped ones. Tests: tests/unit/core/test_cores.py.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from kvmesh.core.control_groups import GROUPS, MEMBERSHIP, group_folders

_UNBOUNDED = ("max", "-1")


def usable_cores() -> int:
    """Returns the number of cores that this process may keep busy, at least 1."""
    seen = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return whole_cores(seen, cpu_quota())


def whole_cores(seen: int, quota: float) -> int:
    """Returns the cores within a quota, rounded down: one thread too many would stop them all."""
    return max(1, int(min(seen, quota)))


def cpu_quota(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns the CPU quota of this process's control groups in cores; infinite without a quota.

    Args:
        groups, membership: as `control_groups.GROUPS` and `control_groups.MEMBERSHIP`.
    """
    files = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}
    found = group_folders("cpu", groups, membership)
    return min((_read(folder, *files[version]) for version, folder in found), default=math.inf)


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
