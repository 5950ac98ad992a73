"""Counts recent reads of each worker's cache. Plain bookkeeping, without clock or I/O.

Load says which workers are busy now. While none is, all holders of a prefix look equal, and chance
reads one more often than another; the only holder of a second prefix is read for that too. Among
otherwise equal holders, routes choose the one with fewer recent reads (TokenLake 4.3: the less
loaded replica). Age is counted in reads, not seconds: a read's weight halves every `HALF_READS`.
Tests: tests/unit/policy/test_recent_reads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvmesh.core.types import RoutePlan, WorkerId
from kvmesh.policy.chain import prefix_behind
from kvmesh.policy.holders import held_by
from kvmesh.policy.view import WorkerView

HALF_READS = 256
"""Number of later reads after which a read counts half: enough to even out the reads of few
holders, few enough to forget holders of prefixes that are no longer requested."""

_GROWTH = 2.0 ** (1.0 / HALF_READS)
_MOST_WEIGHT = 1e30
_FORGOTTEN = 1e-6
"""Tokens of recent reads below which a worker is dropped."""


class RecentReads:
    """Tokens of cached prefixes that routes read on each worker; older reads weigh less."""

    def __init__(self) -> None:
        # New reads get more weight instead of old ones less, so that a read changes one number.
        self._sums: dict[WorkerId, float] = {}
        self._weight = 1.0

    def note(self, plan: RoutePlan, block_size: int) -> None:
        """Counts the reads of a plan's first candidate: of its own cache and of its fetch's source.

        Args:
            block_size: block size of the candidate's layout.
        """
        chosen = plan.prefill[0]
        if chosen.cached_tokens:
            self._add(chosen.worker_id, chosen.cached_tokens)
        source = prefix_behind(chosen.source)
        if source is not None:
            brought = source.num_blocks * block_size - chosen.cached_tokens
            self._add(source.worker_id, max(brought, 0))

    def of(self, worker_id: WorkerId) -> float:
        """Returns the tokens read recently on a worker; 0 for an unknown one."""
        return self._sums.get(worker_id, 0.0) / self._weight

    def among(
        self, workers: Sequence[WorkerView], matches: Mapping[WorkerId, int] | None
    ) -> dict[WorkerId, float]:
        """Returns the recent reads of the workers that hold a part of the prompt: a view's `reads`.

        Args:
            matches: number of leading blocks that each worker holds; None: not known.
        """
        if not matches:
            return {}
        read, weight = self._sums, self._weight
        names = [name for worker in workers if (name := worker.info.worker_id) in read]
        held = held_by(matches, names)
        return {
            name: read[name] / weight for name, blocks in zip(names, held, strict=True) if blocks
        }

    def _add(self, worker_id: WorkerId, num_tokens: int) -> None:
        self._weight *= _GROWTH
        self._sums[worker_id] = self._sums.get(worker_id, 0.0) + num_tokens * self._weight
        if self._weight > _MOST_WEIGHT:
            # Workers that left are dropped as well: nothing was read there for long.
            scaled = {name: sums / self._weight for name, sums in self._sums.items()}
            self._sums = {name: sums for name, sums in scaled.items() if sums > _FORGOTTEN}
            self._weight = 1.0
