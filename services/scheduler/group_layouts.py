"""The KV layouts in use in each group of workers, so that a new worker is compared with few.

Tests: tests/unit/scheduler/test_fleet.py.
"""

from __future__ import annotations

from dataclasses import replace

from kvmesh.core.types import KvLayout, WorkerId, WorkerInfo
from kvmesh.policy.groups import GroupKey


def _group_of(info: WorkerInfo) -> GroupKey:
    """Key of a worker's group in all clusters: routes may pair workers of two clusters."""
    return replace(GroupKey.of(info), cluster="")


class GroupLayouts:
    """Workers by group and layout; all of a group have one layout, except restored ones."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, dict[KvLayout, dict[WorkerId, None]]] = {}

    def add(self, info: WorkerInfo) -> None:
        """Adds a worker."""
        layouts = self._groups.setdefault(_group_of(info), {})
        layouts.setdefault(info.layout, {})[info.worker_id] = None

    def remove(self, info: WorkerInfo) -> None:
        """Removes a worker that was added with this info."""
        group = _group_of(info)
        layouts = self._groups[group]
        del layouts[info.layout][info.worker_id]
        if not layouts[info.layout]:
            del layouts[info.layout]
        if not layouts:
            del self._groups[group]

    def stranger(self, info: WorkerInfo) -> WorkerId | None:
        """Returns another worker of the same group whose KV has another layout; None without one.

        Its cost does not depend on the number of workers: thousands may join at once.
        """
        for layout, names in self._groups.get(_group_of(info), {}).items():
            if layout != info.layout:
                for name in names:
                    if name != info.worker_id:
                        return name
        return None
