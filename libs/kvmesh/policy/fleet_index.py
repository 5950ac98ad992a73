"""A fleet kept in order of load, so that a route decision looks at a few workers, not at all.

`FleetIndex.shortlist` gives the part of the fleet among which the best workers of every side are;
`plan_route` decides on it by its own rules. A candidate list of a few top-ranked workers is also
what P/D-Serve 3.5 offers a request to. Tests: tests/unit/policy/test_fleet_index.py,
tests/property/test_policy_fleet_index.py.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.core.types import KvLayout, Role, RouteQuery, WorkerId
from kvmesh.policy.ranking import BUSY_TOKENS, DECODE_CACHE_WEIGHT
from kvmesh.policy.view import FleetView, WorkerView

WIDTH = 6
"""Workers per side, role and group, and as many of those that hold a prefix."""

SMALL_FLEET = 32
"""Up to so many workers a route looks at all of them."""

MAX_HOLDERS = 32
"""Of more holders (a system prompt that all have) those of the longest prefixes are weighed; the
others are found by their load."""

TOKENS_IN_FLIGHT = 1024
"""Length that is assumed of a prompt on its way; policies take that of the one they decide on."""

_Key = tuple[float, float, float, WorkerId]
"""Full, load, tie, name."""


@dataclass(slots=True)
class _Bucket:
    """Workers of one model, layout, cluster and role, least loaded first, once per side."""

    prefill: list[_Key] = field(default_factory=list)
    decode: list[_Key] = field(default_factory=list)

    def take_out(self, entry: _Entry) -> None:
        """Removes a worker's keys."""
        del self.prefill[bisect_left(self.prefill, entry.prefill)]
        del self.decode[bisect_left(self.decode, entry.decode)]


_BucketName = tuple[str, KvLayout, str, Role]


@dataclass(frozen=True, slots=True)
class _Entry:
    view: WorkerView
    name: _BucketName
    bucket: _Bucket
    prefill: _Key
    decode: _Key


class FleetIndex:
    """Workers by load; an update costs one insertion into a sorted list.

    Orders for the policies `kvmesh`, `cache_load` and `least_loaded`, whose ranks without a cached
    prefix are the load alone; workers of one bucket have equally many slots. A fleet in which
    hybrid and dedicated workers share a group is given whole, since hybrids choose their side by
    the numbers of all.

    Args:
        rng: orders workers of equal load.
        by_tokens: prefill load is the tokens that wait, as for the policy `kvmesh`; else prompts.
    """

    def __init__(self, rng: random.Random, *, by_tokens: bool = False) -> None:
        self._rng = rng
        self._by_tokens = by_tokens
        self._entries: dict[WorkerId, _Entry] = {}
        self._buckets: dict[_BucketName, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def update(self, view: WorkerView) -> None:
        """Takes a worker in, or its new load."""
        info = view.info
        before = self._entries.get(view.worker_id)
        # Hashing a bucket's name costs more than all the rest; most updates are of the load alone.
        if before is not None and before.view.info is info:
            name, bucket = before.name, before.bucket
            bucket.take_out(before)
        else:
            self.remove(view.worker_id)
            name = (info.model, info.layout, info.cluster, info.role)
            bucket = self._buckets.setdefault(name, _Bucket())
        tie = self._rng.random()
        busy, load = self._prefill_load(view)
        decode_share = _decode_share(view)
        entry = _Entry(
            view,
            name,
            bucket,
            (busy, load, tie, view.worker_id),
            (decode_share >= 1.0, decode_share, tie, view.worker_id),
        )
        self._entries[view.worker_id] = entry
        insort(bucket.prefill, entry.prefill)
        insort(bucket.decode, entry.decode)

    def _prefill_load(self, view: WorkerView) -> tuple[bool, float]:
        """Whether it is full and how much waits; being full is part of what waits in tokens."""
        busy = view.prefill_used >= max(view.info.prefill_slots, 1)
        if not self._by_tokens:
            return busy, view.prefill_used
        sent = view.prefill_in_flight * TOKENS_IN_FLIGHT
        return False, view.pending_tokens + sent + BUSY_TOKENS * busy

    def remove(self, worker_id: WorkerId) -> None:
        """Forgets a worker; one that is unknown is no error."""
        entry = self._entries.pop(worker_id, None)
        if entry is None:
            return
        entry.bucket.take_out(entry)
        if not entry.bucket.prefill:
            del self._buckets[entry.name]

    def view(self, version: int = 0, num_routes: int = 0) -> FleetView:
        """The whole fleet."""
        return FleetView(tuple(e.view for e in self._entries.values()), version, num_routes)

    def shortlist(
        self,
        query: RouteQuery,
        matches: Mapping[WorkerId, int] | None,
        now: float,
        silent_after_s: float,
    ) -> FleetView:
        """The workers that a plan for the query should choose from.

        Args:
            matches: leading blocks that workers hold.
            silent_after_s: workers without a report for this long do not count towards the width.

        Returns:
            The whole fleet if nobody of the model can take the query now, so that a refusal can
            name what there is.
        """
        names = [name for name in self._buckets if name[0] == query.model]
        roles: dict[tuple[KvLayout, str], set[Role]] = {}
        for _, layout, cluster, role in names:
            roles.setdefault((layout, cluster), set()).add(role)
        if any(Role.HYBRID in each and len(each) > 1 for each in roles.values()):
            return self.view()

        def counts(view: WorkerView) -> bool:
            return (
                view.worker_id not in query.avoid
                and now - view.reported_at <= silent_after_s
                and _can_hold(view, query)
            )

        chosen: dict[WorkerId, WorkerView] = {}
        for name in names:
            bucket, role = self._buckets[name], name[3]
            if role is not Role.DECODE:
                chosen |= self._walk(bucket.prefill, counts)
            if role is not Role.PREFILL:
                chosen |= self._walk(bucket.decode, counts)
        for view in self._best_holders(query, matches or {}):
            chosen[view.worker_id] = view
        if not any(_can_hold(view, query) for view in chosen.values()):
            return self.view()
        return FleetView(tuple(chosen.values()))

    def _walk(
        self, keys: list[_Key], counts: Callable[[WorkerView], bool]
    ) -> dict[WorkerId, WorkerView]:
        """From the least loaded on, until enough of those seen count."""
        found: dict[WorkerId, WorkerView] = {}
        left = WIDTH
        for key in keys:
            view = self._entries[key[3]].view
            if counts(view):
                found[view.worker_id] = view
                left -= 1
                if not left:
                    break
            elif len(found) < WIDTH:
                # Tried last, but better than nobody.
                found[view.worker_id] = view
        return found

    def _best_holders(self, query: RouteQuery, matches: Mapping[WorkerId, int]) -> list[WorkerView]:
        """Holders of a prefix for whom it outweighs their load most, per side."""
        prefill: list[tuple[float, float, WorkerId]] = []
        decode: list[tuple[float, float, WorkerId]] = []
        names: Iterable[WorkerId] = matches
        if len(matches) > MAX_HOLDERS:
            # By name too, so that the order of the map decides nothing.
            longest = heapq.nlargest(MAX_HOLDERS, ((n, name) for name, n in matches.items()))
            names = [name for _, name in longest]
        for worker_id in names:
            entry = self._entries.get(worker_id)
            if entry is None or entry.name[0] != query.model:
                continue
            size = entry.name[1].block_size
            uncached = max(query.num_tokens - matches[worker_id] * size, 1)
            role = entry.name[3]
            if role is not Role.DECODE:
                busy, load, _, _ = entry.prefill
                cost = load + uncached if self._by_tokens else uncached * (1.0 + load)
                prefill.append((busy, cost, worker_id))
            if role is not Role.PREFILL:
                share = uncached / max(query.num_tokens, 1)
                full, load, _, _ = entry.decode
                decode.append((full, load + DECODE_CACHE_WEIGHT * share, worker_id))
        best = (*heapq.nsmallest(WIDTH, prefill), *heapq.nsmallest(WIDTH, decode))
        return [self._entries[worker_id].view for _, _, worker_id in best]


def _decode_share(view: WorkerView) -> float:
    slots = view.decode_used / max(view.info.decode_slots, 1)
    return max(slots, 1.0 - view.load.blocks_free / max(view.info.num_blocks, 1))


def _can_hold(view: WorkerView, query: RouteQuery) -> bool:
    info = view.info
    longest = min(info.max_model_len, info.num_blocks * info.layout.block_size)
    return not view.load.draining and longest >= query.num_tokens
