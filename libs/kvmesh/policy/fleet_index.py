"""A fleet kept in order of load, so that a route decision looks at a few workers, not at all.

`FleetIndex.shortlist` gives the part of the fleet among which the best workers of every side are;
`plan_route` decides on it by its own rules. A candidate list of a few top-ranked workers is also
what P/D-Serve 3.5 offers a request to. Tests: tests/unit/policy/test_fleet_index.py,
tests/property/test_policy_fleet_index.py.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import KvLayout, Role, RouteQuery, WorkerId
from kvmesh.policy.holders import longest_holders
from kvmesh.policy.ranking import BUSY_TOKENS, decode_cost
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
    """Workers of one model, layout, cluster, role and scenario, least loaded first.

    Attributes:
        prefill, decode: by the load of that side; None is a side that the role does not serve.
    """

    prefill: list[_Key] | None
    decode: list[_Key] | None

    @classmethod
    def of(cls, role: Role) -> _Bucket:
        """An empty one."""
        return cls(None if role is Role.DECODE else [], None if role is Role.PREFILL else [])

    @property
    def is_empty(self) -> bool:
        """Whether nobody is in it."""
        return not self.prefill and not self.decode

    def put(self, entry: _Entry) -> None:
        """Takes a worker's keys in."""
        if self.prefill is not None:
            insort(self.prefill, entry.prefill)
        if self.decode is not None:
            insort(self.decode, entry.decode)

    def take_out(self, entry: _Entry) -> None:
        """Removes a worker's keys."""
        if self.prefill is not None:
            del self.prefill[bisect_left(self.prefill, entry.prefill)]
        if self.decode is not None:
            del self.decode[bisect_left(self.decode, entry.decode)]


_BucketName = tuple[str, KvLayout, str, Role, str]


_UNKNOWN: _Key = (0.0, 0.0, 0.0, WorkerId(""))
"""Of a side that the worker's role does not serve."""


@dataclass(slots=True)
class _Entry:
    """A worker in its bucket; changed with every report, of which there are many.

    Attributes:
        longest: tokens of a sequence that fits.
        model, block_size: also in the name; a route reads them of dozens of holders.
    """

    view: WorkerView
    name: _BucketName
    bucket: _Bucket
    longest: int
    model: str
    block_size: int
    prefill: _Key = _UNKNOWN
    decode: _Key = _UNKNOWN

    def can_hold(self, num_tokens: int) -> bool:
        """Whether the worker takes sequences of that length."""
        return self.longest >= num_tokens and not self.view.load.draining


@dataclass(frozen=True, slots=True)
class _Model:
    """The buckets of one model.

    Attributes:
        is_mixed: hybrid and dedicated workers share a group.
    """

    buckets: tuple[_Bucket, ...]
    is_mixed: bool


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
        self._models: dict[str, _Model] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def update(self, view: WorkerView) -> None:
        """Takes a worker in, or its new load."""
        info = view.info
        worker_id = info.worker_id
        entry = self._entries.get(worker_id)
        # Hashing a bucket's name costs more than all the rest; most updates are of the load alone.
        if entry is not None and entry.view.info is info:
            entry.bucket.take_out(entry)
            entry.view = view
        else:
            self.remove(worker_id)
            name = (info.model, info.layout, info.cluster, info.role, info.scenario)
            longest = min(info.max_model_len, info.num_blocks * info.layout.block_size)
            size = info.layout.block_size
            entry = _Entry(view, name, self._bucket(name), longest, info.model, size)
            self._entries[worker_id] = entry
        tie = self._rng.random()
        bucket = entry.bucket
        if bucket.prefill is not None:
            busy, load = self._prefill_load(view)
            entry.prefill = (busy, load, tie, worker_id)
        if bucket.decode is not None:
            share = _decode_share(view)
            entry.decode = (share >= 1.0, share, tie, worker_id)
        bucket.put(entry)

    def refresh(self, view: WorkerView) -> None:
        """Takes a worker's view whose load is as it was: its place in the order stays."""
        self._entries[view.info.worker_id].view = view

    def _bucket(self, name: _BucketName) -> _Bucket:
        if name not in self._buckets:
            self._buckets[name] = _Bucket.of(name[3])
            self._models.pop(name[0], None)
        return self._buckets[name]

    def _model(self, model: str) -> _Model:
        """The buckets of a model; worked out when one came or went, since layouts hash slowly."""
        found = self._models.get(model)
        if found is None:
            roles: dict[tuple[KvLayout, str], set[Role]] = {}
            for name, layout, cluster, role, _ in self._buckets:
                if name == model:
                    roles.setdefault((layout, cluster), set()).add(role)
            mixed = any(Role.HYBRID in each and len(each) > 1 for each in roles.values())
            buckets = [each for name, each in self._buckets.items() if name[0] == model]
            found = self._models[model] = _Model(tuple(buckets), mixed)
        return found

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
        if entry.bucket.is_empty:
            del self._buckets[entry.name]
            self._models.pop(entry.name[0], None)

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
        model = self._model(query.model)
        if model.is_mixed:
            return self.view()

        chosen: dict[WorkerId, _Entry] = {}
        for bucket in model.buckets:
            for keys in (bucket.prefill, bucket.decode):
                if keys is not None:
                    self._walk(keys, query, now - silent_after_s, chosen)
        longest = longest_holders(matches or {}, MAX_HOLDERS)
        for worker_id in self._best_holders(query, longest):
            chosen[worker_id] = self._entries[worker_id]
        # Whatever their load: others may fetch from them.
        named = self._readable_holders(query, longest, now - silent_after_s)
        # That they are still there says whether their cluster can be reached.
        for worker_id in (*named, *query.lost):
            entry = self._entries.get(worker_id)
            if entry is not None and entry.model == query.model:
                chosen[worker_id] = entry
        if not any(entry.can_hold(query.num_tokens) for entry in chosen.values()):
            return self.view()
        return FleetView(tuple([entry.view for entry in chosen.values()]))

    def _walk(
        self,
        keys: list[_Key],
        query: RouteQuery,
        heard_since: float,
        chosen: dict[WorkerId, _Entry],
    ) -> None:
        """Chooses from the least loaded on, until enough of those seen count."""
        left, seen = WIDTH, 0
        entries, avoid, num_tokens = self._entries, query.avoid, query.num_tokens
        for _, _, _, worker_id in keys:
            entry = entries[worker_id]
            view = entry.view
            counts = (
                worker_id not in avoid
                and view.reported_at >= heard_since
                and entry.longest >= num_tokens
                and not view.load.draining
            )
            # Who does not count is tried last, but is better than nobody.
            if counts or seen < WIDTH:
                chosen[worker_id] = entry
                seen += 1
            left -= counts
            if not left:
                break

    def _readable_holders(
        self, query: RouteQuery, longest: Sequence[tuple[int, WorkerId]], heard_since: float
    ) -> list[WorkerId]:
        """Of the holders that can be read now those that hold most, a few where many are alike."""
        most, found = 0, list[WorkerId]()
        for blocks, worker_id in longest:
            if blocks < most or len(found) >= WIDTH:
                break
            entry = self._entries.get(worker_id)
            if entry is None or entry.model != query.model:
                continue
            if entry.view.reported_at < heard_since or not entry.can_hold(query.num_tokens):
                continue
            most = blocks
            found.append(worker_id)
        return found

    def _best_holders(
        self, query: RouteQuery, holders: list[tuple[int, WorkerId]]
    ) -> list[WorkerId]:
        """Holders of a prefix for whom it outweighs their load most, per side."""
        prefill: list[tuple[float, float, WorkerId]] = []
        decode: list[tuple[float, float, WorkerId]] = []
        find, model, num_tokens = self._entries.get, query.model, query.num_tokens
        by_tokens, whole = self._by_tokens, num_tokens or 1
        for blocks, worker_id in holders:
            entry = find(worker_id)
            if entry is None or entry.model != model:
                continue
            left = num_tokens - blocks * entry.block_size
            uncached = left if left > 1 else 1
            bucket = entry.bucket
            if bucket.prefill is not None:
                busy, load, _, _ = entry.prefill
                cost = load + uncached if by_tokens else uncached * (1.0 + load)
                prefill.append((busy, cost, worker_id))
            if bucket.decode is not None:
                full, load, _, _ = entry.decode
                decode.append((full, decode_cost(load, uncached / whole), worker_id))
        prefill.sort()
        decode.sort()
        return [worker_id for _, _, worker_id in prefill[:WIDTH] + decode[:WIDTH]]


def _decode_share(view: WorkerView) -> float:
    info = view.info
    slots = view.decode_used / (info.decode_slots or 1)
    blocks = 1.0 - view.load.blocks_free / (info.num_blocks or 1)
    return slots if slots > blocks else blocks
