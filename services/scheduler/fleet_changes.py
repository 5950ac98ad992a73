"""Changes of the fleet since an earlier version, as the scheduler sends them to watchers.

Tests: tests/unit/scheduler/test_fleet.py, tests/unit/scheduler/test_feed.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import WorkerId


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A worker that changed. `is_new` is False if only its load changed."""

    worker: FleetWorker
    is_new: bool


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """Changes since an earlier version."""

    workers: tuple[FleetChange, ...]
    gone: tuple[WorkerId, ...]
