"""Plans for the pool: which prefixes to copy to which worker, and which blocks to evict first.

It uses the knowledge of all replicas and asks the store for the holders of hot prefixes.
`policy/pool_plan.py` decides. This module remembers the copies in progress.
Tests: tests/unit/kvmanager/test_pool_planner.py.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.core.clock import Clock
from kvmesh.core.errors import ConfigError
from kvmesh.core.pool import CopyOrder, EvictionHint, PoolMember, PoolOrder
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import BLOCK_HASH_BYTES, BlockHash, WorkerId
from kvmesh.kv.hashing import split_hashes
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.policy.global_lru import PoolEviction, plan_evictions
from kvmesh.policy.heat import COLD_READS, CooledPrefix, HeatTable
from kvmesh.policy.heavy_hitters import num_heavy_hitters
from kvmesh.policy.hot_runs import MAX_HOT_SEGMENTS, Held, HotRun, held_runs, hot_runs, leaves
from kvmesh.policy.pool_plan import (
    CopyLimits,
    PoolPlacement,
    PrefixCopy,
    plan_cluster_copies,
    plan_hints,
    plan_prefix_copies,
    reads_cv,
)
from services.kvmanager import metrics
from services.kvmanager.config import PoolConfig
from services.kvmanager.pool_groups import alike, grouped, namespace_of, scenario_of, work_of

MAX_COOLED = 32
"""Maximum number of prefixes per namespace and plan for which the store is asked for hints."""

BURST_WINDOWS = 3
"""Number of windows whose budget may be saved up, and in which an order counts as in progress."""

MAX_SHOWN = 64

Match = Callable[[str, bytes], Awaitable[Sequence[PrefixMatch]]]
"""Returns the workers that hold a prefix and how much of it, from a namespace and joined hashes."""

Holders = Callable[[str, bytes], Awaitable[Mapping[WorkerId, Collection[BlockHash]]]]
"""Returns which of some blocks each worker holds, from a namespace and joined hashes."""


@dataclass(frozen=True, slots=True)
class PoolReads:
    """The knowledge of all replicas about one namespace.

    Attributes:
        cooled: the cooled prefixes of each replica; one that another replica sees read is not cold.
    """

    table: HeatTable
    cooled: list[CooledPrefix] = field(default_factory=list)


@dataclass(slots=True)
class PoolView:
    """The inputs and orders of the last plan, for people."""

    members: list[PoolMember] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    orders: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_SHOWN))


class _Allowance:
    """Bytes that copies may take still; what a window leaves is kept for `BURST_WINDOWS`."""

    def __init__(self, mb_s: float, window_s: float) -> None:
        self._window_bytes = mb_s * 1e6 * window_s
        self.left = 0.0

    def next_window(self) -> None:
        """Adds those of a window."""
        self.left = min(self.left + self._window_bytes, self._window_bytes * BURST_WINDOWS)


@dataclass(frozen=True, slots=True)
class _HotRuns:
    """The hot prefixes of one namespace.

    Attributes:
        runs: most read first.
        held: blocks of each run's prefix that each worker holds.
    """

    table: HeatTable
    runs: Sequence[HotRun]
    held: Held

    def held_by(self, members: Iterable[PoolMember]) -> _HotRuns:
        """Returns those of which some of these workers hold a part."""
        names = {member.worker_id for member in members}
        runs = [run for run in self.runs if any(map(self.held[run.name].get, names))]
        return _HotRuns(self.table, runs, self.held)


class PoolPlanner:
    """Makes one plan after another.

    Args:
        match, holders: ask the store; may raise StoreUnavailableError, which ends the plan.

    Raises:
        ConfigError: an unknown placement or way of eviction.
    """

    def __init__(self, config: PoolConfig, match: Match, holders: Holders, clock: Clock) -> None:
        self._config = config
        self._placement = _placement_of(config)
        self._eviction = eviction_of(config)
        self._match = match
        self._holders = holders
        self._clock = clock
        self._allowance = _Allowance(config.budget_mb_s, config.window_s)
        self._between = _Allowance(config.between_mb_s, config.window_s)
        self._ordered: dict[tuple[BlockHash, WorkerId], float] = {}
        self._noted: list[dict[str, Any]] = []
        self.view = PoolView()

    async def plan(
        self, reads: Mapping[str, PoolReads], members: Sequence[PoolMember]
    ) -> dict[WorkerId, list[PoolOrder]]:
        """Plans the orders for each worker.

        Args:
            reads: reads by namespace, of all replicas.
            members: members of all replicas.

        Raises:
            StoreUnavailableError: the store could not be asked; nothing is ordered.
        """
        before = self._allowance.left, self._between.left, self._ordered.copy()
        self._noted = []
        try:
            orders = await self._plan(reads, members)
        except StoreUnavailableError:
            # No order is sent, so nothing counts as spent, in progress or ordered.
            self._allowance.left, self._between.left, self._ordered = before
            raise
        for noted in self._noted:
            metrics.POOL_ORDERS.labels(noted["order"]).inc()
            for tier, num_blocks in noted.get("tiers", {}).items():
                metrics.POOL_GIVEN_UP.labels(tier).inc(num_blocks)
        self.view.orders.extend(self._noted)
        return orders

    async def _plan(
        self, reads: Mapping[str, PoolReads], members: Sequence[PoolMember]
    ) -> dict[WorkerId, list[PoolOrder]]:
        now = self._clock.now()
        self._allowance.next_window()
        self._between.next_window()
        self._ordered = {key: end for key, end in self._ordered.items() if now < end}
        shown: list[dict[str, Any]] = []
        orders: dict[WorkerId, list[PoolOrder]] = {}
        for namespace, same in grouped(members, namespace_of):
            known = reads.get(namespace)
            if known is not None:
                shown += await self._plan_copies(namespace, same, known.table, orders)
            if self._eviction is PoolEviction.GLOBAL:
                await self._plan_evictions(namespace, same, known, orders)
            elif known is not None:
                await self._plan_hints(namespace, same, known, orders)
        # Set together, without a wait between: people may look while the store is asked.
        self.view.members = sorted(members, key=lambda member: member.worker_id)
        self.view.segments = shown
        metrics.POOL_HOT_RUNS.set(len(shown))
        return orders

    # --- copies ------------------------------------------------------------------------------

    async def _plan_copies(
        self,
        namespace: str,
        members: Sequence[PoolMember],
        table: HeatTable,
        orders: dict[WorkerId, list[PoolOrder]],
    ) -> list[dict[str, Any]]:
        """Adds copy orders. Returns the hot prefixes, for people."""
        runs = hot_runs(table.hottest(MAX_HOT_SEGMENTS), self._config.min_reads)
        runs = runs[: num_heavy_hitters(len(members))]
        known = {
            leaf.name: await self._lengths(namespace, table.prefix(leaf.name), members)
            for leaf in leaves(runs)
        }
        hot = _HotRuns(table, runs, held_runs(runs, known))
        for _, group in grouped(members, scenario_of):
            # Prefixes that only other groups read get no copies in this group.
            self._plan_group_copies(hot.held_by(group), group, orders)
        _show_unevenness(members)
        return [_shown(namespace, run, hot.held[run.name]) for run in runs]

    def _plan_group_copies(
        self,
        hot: _HotRuns,
        group: Sequence[PoolMember],
        orders: dict[WorkerId, list[PoolOrder]],
    ) -> None:
        """Adds the copy orders of one group: inside its clusters, then between them."""
        # Workers of one role do the same work. Workers of other roles serve only as sources of
        # copies.
        for (cluster, _), readers in grouped(group, work_of):
            near = [member for member in group if member.cluster == cluster]
            limits = CopyLimits(self._allowance.left, placement=self._placement)
            inside = plan_prefix_copies(hot.runs, hot.held, readers, near, self._ordered, limits)
            self._order_copies(inside, near, hot.table, self._allowance, orders)
        between = plan_cluster_copies(hot.runs, hot.held, group, self._ordered, self._between.left)
        self._order_copies(between, group, hot.table, self._between, orders)

    def _order_copies(
        self,
        copies: Iterable[PrefixCopy],
        members: Sequence[PoolMember],
        table: HeatTable,
        allowance: _Allowance,
        orders: dict[WorkerId, list[PoolOrder]],
    ) -> None:
        for copy in copies:
            order = self._copy_order(copy, members, table, allowance)
            orders.setdefault(copy.target, []).append(order)

    def _copy_order(
        self,
        copy: PrefixCopy,
        members: Sequence[PoolMember],
        table: HeatTable,
        allowance: _Allowance,
    ) -> CopyOrder:
        """Makes the order for a planned copy, which counts as in progress from now on."""
        allowance.left -= copy.num_bytes
        end = self._clock.now() + BURST_WINDOWS * self._config.window_s
        self._ordered[copy.run, copy.target] = end
        source = next(each for each in members if each.worker_id == copy.source)
        order = CopyOrder(
            uuid.uuid4().hex,
            source.worker_id,
            source.incarnation,
            source.report.endpoint,
            tuple(split_hashes(table.prefix(copy.run))),
        )
        self._noted.append(
            {
                "order": "copy",
                "order_id": order.order_id,
                "prefix": copy.run.hex(),
                "source": copy.source,
                "target": copy.target,
                "num_blocks": copy.num_blocks,
                "num_bytes": copy.num_bytes,
                "reason": copy.reason.name.lower(),
            }
        )
        return order

    async def _lengths(
        self, namespace: str, prefix: bytes, members: Sequence[PoolMember]
    ) -> dict[WorkerId, int]:
        lives = {member.worker_id: member.incarnation for member in members}
        return {
            found.worker_id: found.num_blocks
            for found in await self._match(namespace, prefix)
            if lives.get(found.worker_id) == found.incarnation
        }

    # --- hints -------------------------------------------------------------------------------

    async def _plan_hints(
        self,
        namespace: str,
        members: Sequence[PoolMember],
        known: PoolReads,
        orders: dict[WorkerId, list[PoolOrder]],
    ) -> None:
        """Tells workers which cold copies to evict first: other workers hold them too."""
        cold = {
            each.name: each
            for each in known.cooled
            if (found := known.table.get(each.name)) is None or found.reads < COLD_READS
        }
        # Shorter prefixes first: a worker evicts the last hint's blocks first.
        chosen = sorted(cold.values(), key=lambda each: len(each.prefix))[:MAX_COOLED]
        runs = [
            HotRun(each.name, None, len(each.prefix) // BLOCK_HASH_BYTES, each.own_blocks, 0.0)
            for each in chosen
        ]
        held = {each.name: await self._lengths(namespace, each.prefix, members) for each in chosen}
        for same in alike(members):
            for worker, names in plan_hints(runs, held, same).items():
                for run in (run for run in runs if run.name in names):
                    own = split_hashes(cold[run.name].prefix)[-run.own_blocks :]
                    orders.setdefault(worker, []).append(EvictionHint(tuple(own)))
                    self._note_hint(run, worker)

    async def _plan_evictions(
        self,
        namespace: str,
        members: Sequence[PoolMember],
        known: PoolReads | None,
        orders: dict[WorkerId, list[PoolOrder]],
    ) -> None:
        """Tells full workers which of the copies that leave next are not needed in the fleet."""
        oldest = {key for member in members for old in member.oldest for key in old.hashes}
        if not oldest:
            return
        held = await self._holders(namespace, b"".join(oldest))
        hot = [] if known is None else known.table.hottest(MAX_HOT_SEGMENTS)
        read = b"".join(each.blocks for each in hot if each.reads >= COLD_READS)
        warm = oldest.intersection(split_hashes(read))
        for same in alike(members):
            for worker, given_up in plan_evictions(same, held, warm).items():
                names = [key for old in given_up for key in old.hashes]
                # The first to leave comes last in a hint, as in a prefix.
                orders.setdefault(worker, []).append(EvictionHint(tuple(reversed(names))))
                tiers = {old.tier: len(old.hashes) for old in given_up}
                self._noted.append(
                    {
                        "order": "evict_first",
                        "prefix": names[0].hex(),
                        "target": worker,
                        "num_blocks": len(names),
                        "tiers": tiers,
                    }
                )

    def _note_hint(self, run: HotRun, worker: WorkerId) -> None:
        self._noted.append(
            {
                "order": "evict_first",
                "prefix": run.name.hex(),
                "target": worker,
                "num_blocks": run.own_blocks,
            }
        )


def _placement_of(config: PoolConfig) -> PoolPlacement:
    try:
        return PoolPlacement(config.placement)
    except ValueError:
        text = f"pool.placement must be local or hashed, not {config.placement!r}"
        raise ConfigError(text) from None


def eviction_of(config: PoolConfig) -> PoolEviction:
    """Returns the configured way of eviction.

    Raises:
        ConfigError: there is no such way.
    """
    try:
        return PoolEviction(config.eviction)
    except ValueError:
        text = f"pool.eviction must be local or global, not {config.eviction!r}"
        raise ConfigError(text) from None


def _shown(namespace: str, run: HotRun, held: Mapping[WorkerId, int]) -> dict[str, Any]:
    return {
        "namespace": namespace,
        "prefix": run.name.hex(),
        "num_blocks": run.num_blocks,
        "own_blocks": run.own_blocks,
        "reads": round(run.reads, 2),
        "holders": sorted(worker for worker, length in held.items() if length >= run.num_blocks),
    }


def _show_unevenness(members: Iterable[PoolMember]) -> None:
    """Publishes how unevenly workers of one kind are read: the value of the most uneven group."""
    for (cluster, role), same in grouped(members, work_of):
        groups = grouped(same, scenario_of)
        metrics.POOL_READS_CV.labels(cluster, role).set(max(reads_cv(each) for _, each in groups))
