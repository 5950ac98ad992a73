"""Judges the fleet's workers by `policy/health.py`: which are tried last, drained or given up.

Tests: tests/unit/scheduler/test_health.py, tests/chaos/test_engine_faults.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvmesh.core.clock import Clock
from kvmesh.core.health import Health
from kvmesh.core.turns import in_turns, rest_s
from kvmesh.core.types import RequestId, RouteQuery, WorkerId
from kvmesh.policy.health import FINE, LOST_WINDOW_S, HealthBoard
from kvmesh.telemetry.logs import event_logger
from services.scheduler import metrics
from services.scheduler.decisions import DecisionLog
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet

log = event_logger(__name__)

JUDGE_S = 0.25


class FleetHealth:
    """Judges workers by their reports and by the losses and refusals that gateways report.

    Args:
        decisions: logs each change of a level.
    """

    def __init__(self, fleet: Fleet, feed: FleetFeed, decisions: DecisionLog, clock: Clock) -> None:
        self._fleet = fleet
        self._feed = feed
        self._decisions = decisions
        self._clock = clock
        self._board = HealthBoard()
        # Counted losses and refusals: the request, the worker, whether it is a loss, and the time.
        self._told: dict[tuple[RequestId, WorkerId, bool], float] = {}
        self._judged_at = self._quiet_at = -1

    @property
    def is_quiet(self) -> bool:
        """Whether all were healthy when last judged, and nobody has told anything new since."""
        return self._fleet.version == self._quiet_at and not self._told

    async def run(self) -> None:
        """Judges periodically, until cancelled."""
        pause_s = JUDGE_S
        while True:
            slept_at = self._clock.now()
            await asyncio.sleep(pause_s)
            now = self._clock.now()
            # After a pause of this process itself, reports of workers are still unread.
            silent = self._fleet.silent(now) if now < slept_at + pause_s + JUDGE_S else {}
            if silent or not self.is_quiet:
                await self.judge(now, silent)
                self._feed.changed()
            pause_s = rest_s(JUDGE_S, self._clock.now() - now)

    def note_query(self, query: RouteQuery, now: float) -> None:
        """Notes what a query tells of workers. A loss or refusal counts once per request."""
        for worker_id in query.unanswered:
            self._board.note_unanswered(worker_id, now)
            self._quiet_at = -1
        for worker_id in query.lost | (query.avoid - query.unanswered):
            is_lost = worker_id in query.lost
            name = (query.request_id, worker_id, is_lost)
            if name not in self._told:
                note = self._board.note_lost if is_lost else self._board.note_refused
                note(worker_id, now)
            self._told[name] = now

    async def judge(self, now: float, silent: Mapping[WorkerId, float] | None = None) -> None:
        """Judges all workers once.

        Args:
            silent: as for `HealthBoard.verdicts`.
        """
        version = self._fleet.version
        verdicts = await in_turns(self._board.verdicts(self._fleet.reports(), now, silent or {}))
        for info in self._fleet.judge(verdicts):
            verdict = verdicts[info.worker_id]
            word = verdict.level.name.lower()
            metrics.HEALTH_CHANGES.labels(info.cluster, word, verdict.reason.name.lower()).inc()
            facts = {"worker_id": info.worker_id, "health": word, "fault": verdict.fault.value}
            self._decisions.add_fleet("health", verdict.reason.name.lower(), **facts)
            log.warning("worker_health", reason=verdict.reason.value, **facts)
        counts = dict.fromkeys(Health, 0)
        for verdict in verdicts.values():
            counts[verdict.level] += 1
        for level, count in counts.items():
            metrics.WORKER_HEALTH.labels(level.name.lower()).set(count)
        self._told = {name: at for name, at in self._told.items() if at > now - 10 * LOST_WINDOW_S}
        # Time changes every verdict but this one. The second look at the same reports tells that
        # they are old: a worker counts as idle from then on.
        is_fine = all(verdict is FINE for verdict in verdicts.values())
        self._quiet_at = version if is_fine and version == self._judged_at else -1
        self._judged_at = version
