"""Limits of the control groups that this process is in, as a container has them.

A container sees the cores and the memory of its host, whatever it may use of them.
Tests: tests/unit/core/test_cores.py, tests/unit/core/test_control_groups.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
"""Mount point of the control groups; version 1 has a folder per controller below it."""

MEMBERSHIP = Path("/proc/self/cgroup")
"""The process's groups (cgroups(7))."""


def group_folders(controller: str, groups: Path, membership: Path) -> Iterator[tuple[int, Path]]:
    """Yields the folders of this process's groups and of their parents; none without groups.

    Each has a limit of its own. Inside a container the parents' folders do not exist, and the
    mount point is its own group.

    Args:
        controller: name of the controller, such as `cpu`.

    Yields:
        The version of the control groups, 1 or 2, and a folder.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mount = 2, groups
        elif controller in controllers.split(","):
            version, mount = 1, groups / controller
        else:
            continue
        parts = PurePosixPath(path).parts[1:]
        for depth in range(len(parts) + 1):
            yield version, mount.joinpath(*parts[:depth])


def memory_left(groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> float:
    """Returns the bytes that this process's groups may still take; infinite without a limit.

    Pages of files that Linux would drop count as free.

    Args:
        groups, membership: as `GROUPS` and `MEMBERSHIP`.
    """
    left = math.inf
    for version, folder in group_folders("memory", groups, membership):
        try:
            left = min(left, _left_in(version, folder))
        except (OSError, ValueError):  # the root group of version 2 has no limit
            continue
    return max(0.0, left)


def _left_in(version: int, folder: Path) -> float:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limit_name, used_name, droppable_name = names[version]
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return math.inf
    droppable = 0
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == droppable_name:
            droppable = int(value)
    return int(limit) - int((folder / used_name).read_text()) + droppable
