"""Keeps a fleet sorted by load, so that a route decision looks at a few workers instead of all.

`FleetIndex.shortlist` returns the part of the fleet that contains the best workers of each side;
`plan_route` then decides by its own rules. P/D-Serve 3.5 likewise offers a request to a few
top-ranked workers. Tests: tests/unit/policy/test_fleet_index.py,
tests/property/test_policy_fleet_index.py.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kvmesh.core.types import KvLayout, Role, RouteQuery, WorkerId
from kvmesh.policy.holders import longest_holders
from kvmesh.policy.ranking import BUSY_TOKENS, decode_cost
from kvmesh.policy.token_pace import takes
from kvmesh.policy.view import FleetView, WorkerView

WIDTH = 6
"""Number of shortlisted workers per side, role and group, and of shortlisted prefix holders."""

MAX_SEEN = 1_000
"""Maximum number of workers that are looked at to find `WIDTH` of a side that take the query.

If all reports are late because the scheduler is behind, a look at the whole fleet would make it
later.
"""

SMALL_FLEET = 32
"""Largest fleet of which a route looks at all workers."""

MAX_HOLDERS = 32
"""Maximum number of prefix holders compared, longest prefixes first. Where more hold one (a common
system prompt), the others are found by their load."""

TOKENS_IN_FLIGHT = 1024
"""Assumed tokens of a prompt in flight; policies assume the length of the prompt that they
route."""

_Key = tuple[float, float, float, WorkerId]
"""Sort key: 1 for a full worker, 2 for one that is tried last; its load, a random tie-break, its
name."""


@dataclass(slots=True)
class _Bucket:
    """Workers of one model, layout, cluster, role and scenario, least loaded first.

    Attributes:
        prefill, decode: sorted by the load of that side; None where the role does not serve it.
    """

    prefill: list[_Key] | None
    decode: list[_Key] | None

    @classmethod
    def of(cls, role: Role) -> _Bucket:
        """Returns an empty bucket for workers of a role."""
        return cls(None if role is Role.DECODE else [], None if role is Role.PREFILL else [])

    @property
    def is_empty(self) -> bool:
        """Whether the bucket has no worker."""
        return not self.prefill and not self.decode

    def put(self, entry: _Entry) -> None:
        """Adds a worker's keys."""
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
"""Key of a side that the worker's role does not serve."""


@dataclass(slots=True)
class _Entry:
    """A worker in its bucket; mutable, because every report changes it.

    Attributes:
        heard_at: as the view's `reported_at`, or when the worker confirmed that report.
        longest: tokens of the longest sequence that fits the worker.
        model, block_size: copies from `name`; a route reads them for dozens of holders.
    """

    view: WorkerView
    name: _BucketName
    bucket: _Bucket
    longest: int
    model: str
    block_size: int
    heard_at: float
    prefill: _Key = _UNKNOWN
    decode: _Key = _UNKNOWN

    def current(self, patience_s: float) -> WorkerView:
        """The view with the time at which the worker was last heard, or `patience_s` later."""
        view, reported_at = self.view, self.heard_at + patience_s
        if view.reported_at == reported_at:
            return view
        return WorkerView(
            view.info,
            view.load,
            reported_at,
            view.prefill_in_flight,
            view.decode_in_flight,
            view.pending_tokens,
        )

    def can_hold(self, num_tokens: int) -> bool:
        """Whether the worker takes sequences of that length."""
        return self.longest >= num_tokens and not self.view.load.draining


@dataclass(frozen=True, slots=True)
class _Model:
    """The buckets of one model.

    Attributes:
        is_mixed: whether hybrid and dedicated workers share a group.
    """

    buckets: tuple[_Bucket, ...]
    is_mixed: bool


class FleetIndex:
    """Workers sorted by load; an update costs one insertion into a sorted list.

    The order suits the policies `kvmesh`, `cache_load` and `least_loaded`, which rank workers
    without a cached prefix by load alone. Workers of one bucket have equally many slots. A fleet
    where hybrid and dedicated workers share a group is returned whole, because hybrids choose their
    side by the load of all.

    Args:
        rng: orders workers of equal load.
        by_tokens: whether prefill load is counted in waiting tokens, as by the policy `kvmesh`;
            else in prompts.

    Attributes:
        patience_s: seconds by which workers may be heard later than in a small fleet; views show
            them as heard so much later.
    """

    def __init__(self, rng: random.Random, *, by_tokens: bool = False) -> None:
        self._rng = rng
        self._by_tokens = by_tokens
        self.patience_s = 0.0
        self._entries: dict[WorkerId, _Entry] = {}
        self._buckets: dict[_BucketName, _Bucket] = {}
        self._models: dict[str, _Model] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def update(self, view: WorkerView) -> None:
        """Adds a worker, or updates its load."""
        info = view.info
        worker_id = info.worker_id
        entry = self._entries.get(worker_id)
        # Most updates change only the load. They skip hashing the bucket's name, the slowest part.
        if entry is not None and entry.view.info is info:
            entry.bucket.take_out(entry)
            entry.view, entry.heard_at = view, view.reported_at
        else:
            self.remove(worker_id)
            name = (info.model, info.layout, info.cluster, info.role, info.scenario)
            longest = min(info.max_model_len, info.num_blocks * info.layout.block_size)
            size, bucket = info.layout.block_size, self._bucket(name)
            entry = _Entry(view, name, bucket, longest, info.model, size, view.reported_at)
            self._entries[worker_id] = entry
        tie = self._rng.random()
        bucket = entry.bucket
        if bucket.prefill is not None:
            busy, load = self._prefill_load(view)
            entry.prefill = (_rank(view, busy=busy), load, tie, worker_id)
        if bucket.decode is not None:
            share = _decode_share(view)
            entry.decode = (_rank(view, busy=share >= 1.0), share, tie, worker_id)
        bucket.put(entry)

    def heard(self, worker_id: WorkerId, at: float) -> None:
        """Notes that a worker confirmed its last report; its place in the order stays."""
        entry = self._entries[worker_id]
        if entry.view.reported_at > -math.inf:  # else it is tried last, whenever it was heard
            entry.heard_at = at

    def _bucket(self, name: _BucketName) -> _Bucket:
        if name not in self._buckets:
            self._buckets[name] = _Bucket.of(name[3])
            self._models.pop(name[0], None)
        return self._buckets[name]

    def _model(self, model: str) -> _Model:
        """Returns the buckets of a model; cached until one is added or removed, as layouts hash
        slowly.
        """
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
        """Returns whether the worker is full, and its prefill load.

        Counted in tokens, the load includes `BUSY_TOKENS` for a full worker.
        """
        used = view.load.prefill_active + view.prefill_in_flight
        busy = used >= (view.info.prefill_slots or 1)
        if not self._by_tokens:
            return busy, used
        sent = view.prefill_in_flight * TOKENS_IN_FLIGHT
        return False, view.pending_tokens + sent + BUSY_TOKENS * busy

    def remove(self, worker_id: WorkerId) -> None:
        """Removes a worker; an unknown one is no error."""
        entry = self._entries.pop(worker_id, None)
        if entry is None:
            return
        entry.bucket.take_out(entry)
        if entry.bucket.is_empty:
            del self._buckets[entry.name]
            self._models.pop(entry.name[0], None)

    def view(self, version: int = 0, num_routes: int = 0) -> FleetView:
        """Returns the view of the whole fleet."""
        return FleetView(
            tuple([e.current(self.patience_s) for e in self._entries.values()]), version, num_routes
        )

    def shortlist(
        self,
        query: RouteQuery,
        matches: Mapping[WorkerId, int] | None,
        now: float,
        silent_after_s: float,
    ) -> FleetView:
        """Returns the workers that a plan for the query chooses from.

        Args:
            matches: number of leading blocks that each worker holds.
            silent_after_s: workers without a report for so many seconds do not count towards
                `WIDTH`.

        Returns:
            The shortlist, or the whole fleet if no worker of the model can take the query now: a
            refusal then names the workers that exist.
        """
        model = self._model(query.model)
        if model.is_mixed:
            return self.view()

        chosen: dict[WorkerId, _Entry] = {}
        silent_after_s += self.patience_s
        for bucket in model.buckets:
            for keys in (bucket.prefill, bucket.decode):
                if keys is not None:
                    self._walk(keys, query, now - silent_after_s, chosen)
            if bucket.prefill is not None and bucket.decode and math.isfinite(query.tpot_s):
                self._add_fullest(bucket.decode, query, now - silent_after_s, chosen)
        longest = longest_holders(matches or {}, MAX_HOLDERS)
        for worker_id in self._best_holders(query, longest):
            chosen[worker_id] = self._entries[worker_id]
        # Holders are listed at any load: other workers may fetch from them.
        named = self._readable_holders(query, longest, now - silent_after_s)
        # Workers that lost the request are listed too: their presence shows that their cluster is
        # still reachable.
        for worker_id in (*named, *query.lost):
            entry = self._entries.get(worker_id)
            if entry is not None and entry.model == query.model:
                chosen[worker_id] = entry
        if not any(entry.can_hold(query.num_tokens) for entry in chosen.values()):
            return self.view()
        return FleetView(tuple([each.current(self.patience_s) for each in chosen.values()]))

    def _walk(
        self,
        keys: list[_Key],
        query: RouteQuery,
        heard_since: float,
        chosen: dict[WorkerId, _Entry],
    ) -> None:
        """Adds workers from the least loaded on to `chosen`, until `WIDTH` of them count."""
        left, seen = WIDTH, 0
        entries, avoid, num_tokens = self._entries, query.avoid, query.num_tokens
        for _, _, _, worker_id in islice(keys, MAX_SEEN):
            entry = entries[worker_id]
            counts = (
                worker_id not in avoid
                and entry.heard_at >= heard_since
                and entry.longest >= num_tokens
                and not entry.view.load.draining
            )
            # A worker that does not count is tried last, but is better than none.
            if counts or seen < WIDTH:
                chosen[worker_id] = entry
                seen += 1
            left -= counts
            if not left:
                break

    def _add_fullest(
        self,
        keys: list[_Key],
        query: RouteQuery,
        heard_since: float,
        chosen: dict[WorkerId, _Entry],
    ) -> None:
        """Adds the fullest hybrids that have room: under tight limits these keep decoding."""
        left = WIDTH
        for index in range(bisect_left(keys, (1.0,)) - 1, -1, -1):
            worker_id = keys[index][3]
            entry = self._entries[worker_id]
            room = entry.view.load.room
            if (
                worker_id not in query.avoid
                and entry.heard_at >= heard_since
                and entry.can_hold(query.num_tokens)
                and takes(room, query.tpot_s, query.num_tokens)
            ):
                chosen[worker_id] = entry
                left -= 1
            if not left:
                return

    def _readable_holders(
        self, query: RouteQuery, longest: Sequence[tuple[int, WorkerId]], heard_since: float
    ) -> list[WorkerId]:
        """Returns up to `WIDTH` holders of the longest prefix that can be read now."""
        most, found = 0, list[WorkerId]()
        for blocks, worker_id in longest:
            if blocks < most or len(found) >= WIDTH:
                break
            entry = self._entries.get(worker_id)
            if entry is None or entry.model != query.model:
                continue
            if entry.heard_at < heard_since or not entry.can_hold(query.num_tokens):
                continue
            most = blocks
            found.append(worker_id)
        return found

    def _best_holders(
        self, query: RouteQuery, holders: list[tuple[int, WorkerId]]
    ) -> list[WorkerId]:
        """Returns per side the holders whose prefix outweighs their load most."""
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


def _rank(view: WorkerView, *, busy: bool) -> float:
    """The first part of a sort key. Routes need not walk past workers that are tried last."""
    return 2.0 if view.reported_at == -math.inf else float(busy)


def _decode_share(view: WorkerView) -> float:
    info, load = view.info, view.load
    # Without `decode_used`: every report and every step of a simulated worker comes here.
    listed = load.decode_running + load.decode_reserved + load.decode_preempted
    slots = (listed + view.decode_in_flight) / (info.decode_slots or 1)
    blocks = 1.0 - load.blocks_free / (info.num_blocks or 1)
    return slots if slots > blocks else blocks
