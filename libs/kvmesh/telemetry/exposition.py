"""Metrics as text, also those of a service that runs as several processes.

Such processes share a folder: each writes its values there, and any of them can tell the sums.
Tests: tests/unit/telemetry/test_exposition.py.
"""

from __future__ import annotations

from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kvmesh.core.config import environment

SHARED_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read by `prometheus_client` when it is imported: set it before a process starts."""


def shared_registry(folder: Path) -> CollectorRegistry:
    """The sums over all processes that write to `folder`, those that ended included."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry


def exposition() -> bytes:
    """The metrics of this process, or of all that it shares a folder with."""
    folder = environment(SHARED_FOLDER_VARIABLE)
    if not folder:
        return prometheus_client.generate_latest()
    return prometheus_client.generate_latest(shared_registry(Path(folder)))
