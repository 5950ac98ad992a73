"""Evictions that the fleet decides (`policy/global_lru.py`), on simulated workers.

Windows, reads and questions are those of the kvmanager's planner. Blocks have 512 tokens, as in
traces, so each is a segment of its own.
Tests: tests/unit/sim/test_eviction.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from kvmesh.core.pool import PoolMember, PoolReport
from kvmesh.core.types import BlockHash
from kvmesh.kv.oldest import evict_first, oldest_blocks
from kvmesh.policy.global_lru import MAX_OLDEST, plan_evictions
from kvmesh.policy.heat import COLD_READS, FADE, MAX_SEGMENTS, WINDOW_S, HeatTable
from kvmesh.policy.hot_runs import MAX_HOT_SEGMENTS
from kvmesh.sim.events import EventQueue
from kvmesh.sim.fleet import SimFleet
from kvmesh.sim.worker import SimWorker


class FleetEviction:
    """Tells full workers each window which of the copies that leave next are not needed.

    Attributes:
        given_up: blocks that workers were told to give up, by tier.
    """

    def __init__(self, events: EventQueue, fleet: SimFleet) -> None:
        self._events = events
        self._fleet = fleet
        self._heat = HeatTable(1, MAX_SEGMENTS)
        self.given_up: Counter[str] = Counter()

    def start(self) -> None:
        """Schedules the end of the first window."""
        self._events.after(WINDOW_S, self._end_window)

    def note(self, found: Sequence[BlockHash]) -> None:
        """Counts a read of a prefix that some worker holds."""
        self._heat.note(b"".join(found))

    def _end_window(self) -> None:
        hot = self._heat.hottest(MAX_HOT_SEGMENTS)
        warm = {each.name for each in hot if each.reads >= COLD_READS}
        for same in self._alike():
            members = {each.info.worker_id: each for each in same}
            asked = [_member(each) for each in same]
            oldest = {key for member in asked for old in member.oldest for key in old.hashes}
            held = self._fleet.index.holders(members, oldest)
            for worker_id, given_up in plan_evictions(asked, held, warm).items():
                for old in given_up:
                    evict_first(members[worker_id].pool, old.hashes[::-1])
                    self.given_up[old.tier] += len(old.hashes)
        self._heat.fade(FADE)
        self._events.after(WINDOW_S, self._end_window)

    def _alike(self) -> list[list[SimWorker]]:
        def kind(worker: SimWorker) -> tuple[str, str]:
            return worker.info.role.value, worker.info.cluster

        return [list(same) for _, same in groupby(sorted(self._fleet.living(), key=kind), kind)]


def _member(worker: SimWorker) -> PoolMember:
    info, pool = worker.info, worker.pool
    report = PoolReport(info.role, info.control_endpoint, 1, pool.num_empty, 0)
    oldest = oldest_blocks(pool, MAX_OLDEST)
    return PoolMember(
        info.worker_id, info.incarnation, info.cluster, info.model, report, 0.0, oldest
    )
