"""How much of each worker's cache was read of late. Plain bookkeeping, without clock or I/O.

A load says who is busy now. While nobody is, all holders of a prefix look alike, and chance reads
one of them more than another; one that alone holds a second prefix is read for that, too. Who was
read less is the better one of several that are otherwise equal (TokenLake 4.3: of the replicas, the
less loaded). Age is counted in reads, not seconds: what was read before so many others counts half.
Tests: tests/unit/policy/test_recent_reads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvmesh.core.types import RoutePlan, WorkerId
from kvmesh.policy.holders import held_by
from kvmesh.policy.view import WorkerView

HALF_READS = 256
"""After so many reads one counts half: long enough to even out what is read of few holders, short
enough to forget who held what is no longer asked for."""

_GROWTH = 2.0 ** (1.0 / HALF_READS)
_MOST_WEIGHT = 1e30
_FORGOTTEN = 1e-6
"""A millionth of a token is nothing."""


class RecentReads:
    """Tokens of cached prefixes that routes had read, by worker, older ones counting less."""

    def __init__(self) -> None:
        # New reads weigh more instead of old ones less, so that a read touches one number.
        self._sums: dict[WorkerId, float] = {}
        self._weight = 1.0

    def note(self, plan: RoutePlan, block_size: int) -> None:
        """Takes in what a plan's first candidate reads: its own cache and the one it fetches from.

        Args:
            block_size: of the candidate's layout.
        """
        chosen = plan.prefill[0]
        if chosen.cached_tokens:
            self._add(chosen.worker_id, chosen.cached_tokens)
        source = chosen.source
        if source is not None and not source.computes:
            brought = source.num_blocks * block_size - chosen.cached_tokens
            self._add(source.worker_id, max(brought, 0))

    def of(self, worker_id: WorkerId) -> float:
        """Tokens that were read there; 0 for one that is not known."""
        return self._sums.get(worker_id, 0.0) / self._weight

    def among(
        self, workers: Sequence[WorkerView], matches: Mapping[WorkerId, int] | None
    ) -> dict[WorkerId, float]:
        """Of the workers that hold something, what was read there: a view's `reads`.

        Args:
            matches: leading blocks that workers hold; None when nobody knows.
        """
        if not matches:
            return {}
        read, weight = self._sums.get, self._weight
        names = [worker.info.worker_id for worker in workers]
        found: dict[WorkerId, float] = {}
        for name, blocks in zip(names, held_by(matches, names), strict=True):
            if blocks:
                tokens = read(name)
                if tokens is not None:
                    found[name] = tokens / weight
        return found

    def _add(self, worker_id: WorkerId, num_tokens: int) -> None:
        self._weight *= _GROWTH
        self._sums[worker_id] = self._sums.get(worker_id, 0.0) + num_tokens * self._weight
        if self._weight > _MOST_WEIGHT:
            # Those that are gone go, too: nothing has been read there for long.
            scaled = {name: sums / self._weight for name, sums in self._sums.items()}
            self._sums = {name: sums for name, sums in scaled.items() if sums > _FORGOTTEN}
            self._weight = 1.0
