"""Orders the requests that wait for a worker: fair between tenants, by weight.

Start-time fair queueing over prompt tokens: each tenant has a virtual time that advances by
cost / weight with every request that is placed. The waiting request with the smallest start time
goes first. A tenant that begins to wait starts at the present virtual time, so that idle time is
not saved up. A request that leaves without being placed costs nothing. Higher priorities go first.

Source: Goyal, Vin, Cheng, "Start-time Fair Queuing", SIGCOMM 1996. For LLM requests: "Fairness in
Serving Large Language Models", OSDI 2024 (VTC). Tests: tests/unit/policy/test_fair_share.py.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush

from kvmesh.core.values import quick

MIN_HEADS = 4
MAX_HEADS = 64
"""Bounds of the number of requests that look for workers at once while prefill is scarce."""

LEAST_RATE = 1 / 8
"""How often the last heads ask at least, over how often the first one asks."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request that wants a worker.

    Attributes:
        tenant: name of the tenant; the empty name is a tenant too.
        cost: prompt tokens, or another unit common to all claims; above 0.
        weight: the tenant's share.
        priority: priority of the tenant; a higher one goes first, regardless of the shares.
        rank: order within the tenant; lower goes first, equal ones in the order of arrival.
    """

    tenant: str
    cost: float
    weight: float = 1.0
    priority: int = 0
    rank: int = 0


quick(Claim)  # for speed, as in `load_score.py`

Entry = tuple[int, int, Hashable]
"""(rank, number of arrival, name): the order within a tenant."""


@cache
def head_pauses(num_heads: int) -> tuple[float, ...]:
    """Returns factors on the pauses between two rounds of a line's heads, from first to last.

    Each asks half as often as the one before it, so that the first most likely gets what becomes
    free; together they ask as often as if all factors were 1.
    """
    rates = [max(0.5**place, LEAST_RATE) for place in range(num_heads)]
    return tuple(sum(rates) / num_heads / rate for rate in rates)


class _Line:
    """The waiting requests for the prefill workers of one cluster.

    Attributes:
        queues: by (-priority, tenant), each sorted.
        width: number of heads if enough requests wait.
        found: the heads; None after a change that may add to them or reorder them.
    """

    def __init__(self) -> None:
        self.queues: dict[tuple[int, str], list[Entry]] = {}
        self.width = MIN_HEADS
        self.found: list[Hashable] | None = None

    def add(self, claim: Claim, entry: Entry) -> None:
        key = (-claim.priority, claim.tenant)
        insort(self.queues.setdefault(key, []), entry, key=_order)
        self.found = None

    def remove(self, claim: Claim, entry: Entry) -> None:
        key = (-claim.priority, claim.tenant)
        entries = self.queues[key]
        del entries[bisect_left(entries, _order(entry), key=_order)]
        if not entries:
            del self.queues[key]
        self.found = None


class FairQueue:
    """Waiting requests; the `heads` may look for a worker now.

    The number of heads grows while heads are placed and shrinks while workers refuse them. So few
    requests ask in vain when all workers are full, and freed workers get requests when not. After
    `split`, requests for either of two clusters have heads of their own: those that wait for the
    workers of one do not hold up those for the other. So have new ones, whose cluster is not known.
    """

    def __init__(self) -> None:
        self._claims: dict[Hashable, tuple[Claim, Entry]] = {}
        # Whether a request is for the remote cluster; None: not known.
        self._remote: dict[Hashable, bool | None] = {}
        self._lines: dict[bool | None, _Line] = {None: _Line()}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._arrivals = 0
        self._found: list[Hashable] | None = None  # the answer of `heads`

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, name: Hashable, claim: Claim) -> None:
        """Adds a request that begins to wait."""
        assert name not in self._claims, f"{name} waits already"
        assert claim.cost > 0, "a request costs something"
        assert claim.weight > 0, "a tenant has a share"
        self._arrivals += 1
        self._found = None
        entry = (claim.rank, self._arrivals, name)
        self._claims[name] = (claim, entry)
        self._remote[name] = None
        self._lines[None].add(claim, entry)

    def split(self) -> None:
        """Says that there are two clusters; while there is one, one line of requests is enough."""
        if len(self._lines) == 1:
            self._lines |= {True: _Line(), False: _Line()}

    def waits_for(self, name: Hashable, *, remote: bool) -> bool:
        """Says whose prefill workers a request waits for; its place among them is by arrival.

        Returns whether it stood in another line before.
        """
        before = self._remote[name]
        if before is remote or len(self._lines) == 1:
            return False
        claim, entry = self._claims[name]
        self._lines[before].remove(claim, entry)
        self._remote[name] = remote
        self._lines[remote].add(claim, entry)
        self._found = None
        return True

    def placed(self, name: Hashable) -> None:
        """Removes a request that found its workers, and charges its tenant."""
        claim, _ = self._claims[name]
        start = self._start(claim.tenant)
        self._virtual = start
        self._finish[claim.tenant] = start + claim.cost / claim.weight
        line = self._line(name)
        line.width = min(MAX_HEADS, line.width + 1)
        self.left(name)
        for line in self._lines.values():  # the charge reorders all of them
            line.found = None

    def missed(self, name: Hashable) -> None:
        """Records that a head found no workers."""
        line = self._line(name)
        line.width = max(MIN_HEADS, line.width - 1)
        if line.found is not None and len(line.found) > line.width:
            line.found = line.found[: line.width]
            self._found = None

    def left(self, name: Hashable) -> None:
        """Removes a request that no longer waits, without a charge."""
        self._found = None
        line = self._line(name)
        line.remove(*self._claims.pop(name))
        del self._remote[name]
        if not self._claims:  # an empty queue forgets past usage
            self._finish.clear()
            self._virtual = 0.0

    def heads(self) -> Sequence[Hashable]:
        """Returns the requests whose turn it is, best first; not empty while any waits.

        Calls return the same object until the heads change. While workers are full, each of the
        waiting requests misses several times a second, and most misses change nothing.
        """
        if self._found is None:
            found: list[Hashable] = []
            for line in self._lines.values():
                if line.found is None:
                    line.found = self._find_heads(line)
                found += line.found
            self._found = found
        return self._found

    def pace(self, name: Hashable) -> float:
        """Returns the factor on the pause of a waiting request between two rounds.

        The total rate of asking does not depend on the number of requests that may ask.
        """
        heads, line = self.heads(), self._line(name).found
        assert line is not None, "found with the heads"
        place = line.index(name) if name in line else len(line) - 1
        return head_pauses(len(line))[place] * len(heads) / len(self._claims)

    def _line(self, name: Hashable) -> _Line:
        return self._lines[self._remote[name]]

    def _find_heads(self, line: _Line) -> list[Hashable]:
        found: list[Hashable] = []
        for level in sorted({level for level, _ in line.queues}):
            if len(found) < line.width:
                found += self._in_order(line, level, line.width - len(found))
        return found

    def _in_order(self, line: _Line, level: int, count: int) -> list[Hashable]:
        """Returns the first `count` requests of one priority, by virtual start and arrival."""
        merged = [
            (self._start(tenant), entries[0][1], tenant, 0)
            for (its_level, tenant), entries in line.queues.items()
            if its_level == level
        ]
        heapify(merged)
        found: list[Hashable] = []
        while merged and len(found) < count:
            start, _, tenant, index = heappop(merged)
            entries = line.queues[level, tenant]
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
