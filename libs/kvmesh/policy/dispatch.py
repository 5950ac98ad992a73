"""Assigns the batches of a step to workers so that the fewest bytes of KV and queries travel.

Source: TokenLake 5 (bipartite matching). Tests: tests/unit/policy/test_dispatch.py,
tests/property/test_policy_properties.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.types import WorkerId
from kvmesh.policy.matching import least_total


@dataclass(frozen=True, slots=True)
class BatchTraffic:
    """Reads and writes of a batch; a batch on k workers is k of these (sub-batches of section 5).

    Attributes:
        query_workers: Q(u), workers that hold segments that the batch reads.
        put_tokens: N_p(u, v), tokens of new KV by the worker that will store them; its keys are
            P(u).
    """

    query_workers: frozenset[WorkerId]
    put_tokens: Mapping[WorkerId, int]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One worker per batch, in the order of the batches.

    Attributes:
        volume_bytes: total bytes per layer that travel.
    """

    workers: tuple[WorkerId, ...]
    volume_bytes: int


def volume(batch: BatchTraffic, worker: WorkerId, hidden_size: int) -> int:
    """Returns the bytes per layer that travel if the batch runs on `worker`: -e(u, v), section
    5.
    """
    queries = len(batch.query_workers - {worker})
    puts = sum(tokens for target, tokens in batch.put_tokens.items() if target != worker)
    return 4 * hidden_size * (queries + puts)


def dispatch(
    batches: Sequence[BatchTraffic], workers: Sequence[WorkerId], hidden_size: int
) -> Dispatch:
    """Returns the assignment of least total volume, in O(n^3) (Hungarian method, section 5).

    Args:
        workers: live workers, at least as many as batches; each takes at most one batch.
    """
    assert len(batches) <= len(workers), f"{len(batches)} batches for {len(workers)} workers"
    if not batches:
        return Dispatch((), 0)
    costs = [[volume(batch, worker, hidden_size) for worker in workers] for batch in batches]
    chosen = least_total(costs)
    return Dispatch(
        tuple(workers[column] for column in chosen),
        sum(row[column] for row, column in zip(costs, chosen, strict=True)),
    )
