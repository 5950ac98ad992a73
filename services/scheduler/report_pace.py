"""How often workers report: less often in a large fleet, or reports would fill the scheduler.

A broken connection is noticed at once at any pace. Only a worker that stops without breaking it,
as when its machine freezes, is noticed later. Tests: tests/unit/scheduler/test_report_pace.py.
"""

from __future__ import annotations

import math

from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.v1.scheduler_service_pb2 import WorkerAccepted
from services.scheduler.config import FleetConfig

WORKERS_AT_FULL_PACE = 2_000
"""Largest fleet that reports as configured; in one of N times the size, intervals are N times as
long. The reports of idle workers then take at most a tenth of a core."""

SHRINK_SHARE = 0.8
"""A smaller fleet reports more often only below this share of the size at which it slowed down."""

ALIVE_INTERVAL_S = SILENT_AFTER_S * 2 / 3
"""Seconds between messages of a worker with an unchanged load: before it counts as silent."""


class ReportPace:
    """The intervals at which all workers of a fleet report.

    Attributes:
        factor: how many times longer than configured they are.
    """

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._alive_s = min(config.lease_s / 3, ALIVE_INTERVAL_S)
        self._before = 1
        self._before_until = -math.inf
        self.factor = 1

    def adapt(self, num_workers: int, now: float) -> bool:
        """Chooses the intervals for a fleet of this size. Returns whether they changed."""
        before, wanted = self.factor, max(math.ceil(num_workers / WORKERS_AT_FULL_PACE), 1)
        shrinks = num_workers < SHRINK_SHARE * (before - 1) * WORKERS_AT_FULL_PACE
        if wanted == before or not (wanted > before or shrinks):
            return False
        self.factor = wanted
        if shrinks:  # a worker that has not been told yet still keeps the longer interval
            self._before, self._before_until = before, now + 2 * before * self._alive_s
        return True

    def patience_s(self, now: float) -> float:
        """Seconds by which any worker may report later than it would in a small fleet."""
        factor = max(self.factor, self._before) if now < self._before_until else self.factor
        return (factor - 1) * self._alive_s

    def accepted(self) -> WorkerAccepted:
        """The message that tells a worker the intervals."""
        lease_s = self._config.lease_s + (self.factor - 1) * self._alive_s
        return WorkerAccepted(
            report_interval_ms=round(self.factor * self._config.report_interval_s * 1000),
            lease_ms=round(lease_s * 1000),
            alive_interval_ms=round(self.factor * self._alive_s * 1000),
        )
