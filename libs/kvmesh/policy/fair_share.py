"""Whose turn it is among the requests that wait for a worker: fair between tenants, by weight.

Start-time fair queueing over prompt tokens: each tenant has a virtual time that advances by
cost / weight with every request that was placed; the waiting request with the smallest start goes
first. A tenant that waits for the first time starts at the present virtual time, so that rest is
not saved up. Who leaves without being placed has cost nothing. Higher priorities go first.

Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996. For LLM requests: "Fairness in
Serving Large Language Models", OSDI 2024 (VTC). Tests: tests/unit/policy/test_fair_share.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kvmesh.core.values import quick

MIN_HEADS = 4
MAX_HEADS = 64
"""Bounds of how many requests look for workers at once while prefill is scarce."""


@quick
@dataclass(frozen=True, slots=True)
class Claim:
    """A request that wants a worker.

    Attributes:
        tenant: who shares; empty is a tenant too.
        cost: in any unit that all use, more than zero; prompt tokens.
        weight: the tenant's share.
        priority: of the tenant; higher goes first, whatever the shares are.
        rank: within the tenant, lower goes first; equal ones in the order of arrival.
    """

    tenant: str
    cost: float
    weight: float = 1.0
    priority: int = 0
    rank: int = 0


Entry = tuple[int, int, Hashable]
"""(rank, number of arrival, name): the order within a tenant."""


class FairQueue:
    """Waiting requests; `heads` are those that may look for a worker now.

    The number of heads adapts: it grows while heads are placed and shrinks while they look in vain,
    so that little is asked in vain when all is full, and freed workers find takers when it is not.
    """

    def __init__(self) -> None:
        self._claims: dict[Hashable, tuple[Claim, Entry]] = {}
        # (-priority, tenant) -> its waiting requests, sorted.
        self._queues: dict[tuple[int, str], list[Entry]] = {}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._arrivals = 0
        self._width = MIN_HEADS

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, name: Hashable, claim: Claim) -> None:
        """A request begins to wait."""
        assert name not in self._claims, f"{name} waits already"
        assert claim.cost > 0, "a request costs something"
        assert claim.weight > 0, "a tenant has a share"
        self._arrivals += 1
        entry = (claim.rank, self._arrivals, name)
        self._claims[name] = (claim, entry)
        insort(self._queues.setdefault((-claim.priority, claim.tenant), []), entry, key=_order)

    def placed(self, name: Hashable) -> None:
        """A waiting request found its workers: its tenant pays."""
        claim, _ = self._claims[name]
        start = self._start(claim.tenant)
        self._virtual = start
        self._finish[claim.tenant] = start + claim.cost / claim.weight
        self._width = min(MAX_HEADS, self._width + 1)
        self.left(name)

    def missed(self) -> None:
        """A head looked for workers in vain."""
        self._width = max(MIN_HEADS, self._width - 1)

    def left(self, name: Hashable) -> None:
        """A request does not wait any more; by itself this costs nothing."""
        claim, entry = self._claims.pop(name)
        key = (-claim.priority, claim.tenant)
        entries = self._queues[key]
        del entries[bisect_left(entries, _order(entry), key=_order)]
        if not entries:
            del self._queues[key]
        if not self._claims:  # what was used in the past is nobody's advantage now
            self._finish.clear()
            self._virtual = 0.0

    def heads(self) -> list[Hashable]:
        """The requests whose turn it is, best first; never empty while any waits."""
        found: list[Hashable] = []
        for level in sorted({level for level, _ in self._queues}):
            if len(found) < self._width:
                found += self._in_order(level, self._width - len(found))
        return found

    def _in_order(self, level: int, count: int) -> list[Hashable]:
        """The first `count` requests of one priority, by virtual start and arrival."""
        merged = [
            (self._start(tenant), entries[0][1], tenant, 0)
            for (its_level, tenant), entries in self._queues.items()
            if its_level == level
        ]
        heapify(merged)
        found: list[Hashable] = []
        while merged and len(found) < count:
            start, _, tenant, index = heappop(merged)
            entries = self._queues[level, tenant]
            name = entries[index][2]
            found.append(name)
            if index + 1 < len(entries):
                claim, _ = self._claims[name]
                after = start + claim.cost / claim.weight
                heappush(merged, (after, entries[index + 1][1], tenant, index + 1))
        return found

    def _start(self, tenant: str) -> float:
        return max(self._virtual, self._finish.get(tenant, 0.0))


def _order(entry: Entry) -> tuple[int, int]:
    return entry[:2]
