"""The kvmanager's management of the pool.

It counts reads and shares the counts with other replicas. It plans copies while it has the lease,
and sends orders to the workers that are connected to it. Lookups and block events do not depend on
it. All of it may fail: workers then keep the copies that they have.
Tests: tests/unit/kvmanager/test_pool.py, tests/integration/test_pool.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from kvmesh.core.clock import Clock
from kvmesh.core.errors import ProtocolError
from kvmesh.core.pool import OldestOrder, PoolMember
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.metadata.pool_store import PoolStore
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.policy.global_lru import MAX_OLDEST, PoolEviction
from kvmesh.policy.heat import COLD_READS, FADE, HeatTable
from kvmesh.policy.hot_runs import MAX_HOT_SEGMENTS
from kvmesh.policy.pool_plan import reads_cv
from kvmesh.rpc.convert_pool import (
    cooled_from_proto,
    heat_from_proto,
    knowledge_to_proto,
    pool_member_from_proto,
    pool_order_to_proto,
)
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import pool_types_pb2
from services.kvmanager import metrics
from services.kvmanager.config import PoolConfig
from services.kvmanager.guard import StoreGuard
from services.kvmanager.heat import HeatBoard
from services.kvmanager.pool_planner import MAX_COOLED, PoolPlanner, PoolReads, eviction_of
from services.kvmanager.pool_seat import PoolSeat

TICKS_PER_WINDOW = 20
"""Number of times per window that orders are fetched and notes are counted."""

KEPT_WINDOWS = 3
"""Number of windows after which an order, the lease, and a silent replica's knowledge expire."""

log = event_logger(__name__)


class Pool:
    """One replica's management of the pool.

    Args:
        store: shared by all replicas.
        replica: this replica's name.

    Attributes:
        heat: lookups note their reads here.
        planning: whether this replica made the last plan.
    """

    def __init__(
        self, config: PoolConfig, store: PoolStore, guard: StoreGuard, clock: Clock, replica: str
    ) -> None:
        self._config = config
        self._store = store
        self._guard = guard
        self._replica = replica
        self._seats: set[PoolSeat] = set()
        self._planner = PoolPlanner(config, self._match, self._holders, clock)
        self._evicts = eviction_of(config) is PoolEviction.GLOBAL
        self.heat = HeatBoard(self._make_table)
        self.planning = False

    def _make_table(self) -> HeatTable:
        return HeatTable(self._config.segment_blocks, self._config.max_segments)

    async def _match(self, namespace: str, prefix: bytes) -> Sequence[PrefixMatch]:
        return await self._guard.call(lambda store: store.match(namespace, prefix))

    async def _holders(
        self, namespace: str, hashes: bytes
    ) -> Mapping[WorkerId, Collection[BlockHash]]:
        return await self._guard.call(lambda store: store.holders(namespace, hashes))

    def join(self, seat: PoolSeat) -> None:
        """Adds a connected worker."""
        self._seats.add(seat)

    def leave(self, seat: PoolSeat) -> None:
        """Removes a worker whose connection ended."""
        self._seats.discard(seat)

    async def run(self) -> None:
        """Manages the pool until cancelled."""
        try:
            while True:
                for tick in range(TICKS_PER_WINDOW):
                    if tick == TICKS_PER_WINDOW - 1:
                        self.ask_oldest()  # the answers are here when the window ends
                    await asyncio.sleep(self._config.window_s / TICKS_PER_WINDOW)
                    await self.heat.count()
                    await self._safely(self._hand_out)
                await self._safely(self.end_window)
        finally:
            with contextlib.suppress(StoreUnavailableError):
                await self._store.end_plan(self._replica)

    async def _safely(self, work: Callable[[], Awaitable[None]]) -> None:
        # While the store is down, only the guard probes it, and reports the failure.
        if self._guard.up:
            try:
                await work()
            except StoreUnavailableError as error:
                log.debug("pool_store_failed", error=str(error))
            except (DecodeError, ProtocolError) as error:
                # The state comes from another version or another program; it expires by itself.
                log.warning("pool_state_damaged", error=str(error))
            else:
                return
        self._set_planning(False)

    def ask_oldest(self) -> None:
        """Asks the workers what leaves them next, where the fleet decides about that."""
        for seat in self._seats if self._evicts else ():
            seat.ask_oldest(OldestOrder(MAX_OLDEST))

    async def end_window(self) -> None:
        """Shares the reads, plans if no other replica does, and lets old reads fade.

        Raises:
            StoreUnavailableError: the store could not be asked; reads have faded all the same.
        """
        heat = self.heat.hottest(MAX_HOT_SEGMENTS)
        cooled = self.heat.cooled(COLD_READS * FADE, COLD_READS, MAX_COOLED)
        members = [seat.member for seat in self._seats]
        present = [member for member in members if member is not None]
        knowledge = knowledge_to_proto(heat, cooled, present)
        self.heat.fade(FADE)
        for seat in self._seats:
            seat.fade(FADE)
        if self._config.budget_mb_s > 0 or self._evicts:
            kept_s = self._config.window_s * KEPT_WINDOWS
            await self._store.put_knowledge(self._replica, knowledge.SerializeToString(), kept_s)
            self._set_planning(await self._store.may_plan(self._replica, kept_s))
            if self.planning:
                await self._plan(kept_s)

    def _set_planning(self, planning: bool) -> None:
        self.planning = planning
        metrics.POOL_PLANNING.set(planning)
        if not planning:
            metrics.POOL_HOT_RUNS.set(0)

    async def _plan(self, kept_s: float) -> None:
        reads, members = merge_knowledge(await self._store.all_knowledge(), self._make_table)
        for worker_id, orders in (await self._planner.plan(reads, members)).items():
            encoded = [pool_order_to_proto(order).SerializeToString() for order in orders]
            await self._store.put_orders(worker_id, encoded, kept_s)

    async def _hand_out(self) -> None:
        """Sends waiting orders to the workers that are connected here."""
        seats = {seat.publisher.worker_id: seat for seat in self._seats if seat.member is not None}
        if not seats:
            return
        for worker_id, orders in (await self._store.take_orders(list(seats))).items():
            for order in orders:
                seats[worker_id].order(pool_types_pb2.PoolOrder.FromString(order))

    def shown(self, _query: Mapping[str, str]) -> dict[str, Any]:
        """`/debug/segments`: hot prefixes with their holders, reads per worker, the last orders."""
        view = self._planner.view
        return {
            "planning": self.planning,
            "reads_cv": round(reads_cv(view.members), 4),
            "workers": [
                {
                    "worker_id": member.worker_id,
                    "cluster": member.cluster,
                    "role": member.report.role.value,
                    "read_blocks": round(member.read_blocks, 2),
                    "room_blocks": member.report.room_blocks,
                    "leaving": member.report.leaving,
                }
                for member in view.members
            ],
            "segments": view.segments,
            "orders": list(view.orders),
        }


def merge_knowledge(
    told: Iterable[bytes], make_table: Callable[[], HeatTable]
) -> tuple[dict[str, PoolReads], list[PoolMember]]:
    """Merges the knowledge of all replicas: reads by namespace, and the members of the pool.

    A worker that two replicas report has moved from one to the other. Its newer incarnation counts,
    or for the same incarnation the report with more reads. Damaged knowledge is left out.
    """
    reads: dict[str, PoolReads] = {}
    members: dict[WorkerId, PoolMember] = {}
    for encoded in told:
        try:
            knowledge = pool_types_pb2.PoolKnowledge.FromString(encoded)
            found = [pool_member_from_proto(each) for each in knowledge.members]
            read = [
                (each.namespace, heat_from_proto(each), cooled_from_proto(each))
                for each in knowledge.heat
            ]
        except (DecodeError, ProtocolError) as error:
            log.warning("pool_knowledge_damaged", error=str(error))
            continue
        for namespace, segments, cooled in read:
            known = reads.get(namespace)
            if known is None:
                known = reads[namespace] = PoolReads(make_table())
            known.table.merge(segments)
            known.cooled.extend(cooled)
        for member in found:
            before = members.get(member.worker_id)
            if before is None or _age(member) > _age(before):
                members[member.worker_id] = member
    return reads, list(members.values())


def _age(member: PoolMember) -> tuple[int, float]:
    return member.incarnation, member.read_blocks
