"""Plans which workers batches query, store prefixes on and run on. Pure.

Source: TokenLake 3.2 (Figure 5), 5. Tests: tests/unit/pool/test_plans.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import BlockHash, WorkerId, WorkerInfo
from kvmesh.policy.dispatch import BatchTraffic, dispatch
from kvmesh.policy.prefix_source import choose_holder

Match = Callable[[str, Sequence[BlockHash]], Mapping[WorkerId, int]]
"""Returns the number of leading blocks that each worker holds of a prefix in a namespace."""


class PrefixTree:
    """The workers of one model at one moment, and their blocks.

    Attributes:
        workers: workers of the model by name, without those that drain.
    """

    def __init__(self, model: str, workers: Sequence[FleetWorker], match: Match) -> None:
        """`match` answers from the index at the time of the call."""
        here = [each for each in workers if each.info.model == model and each.info.publishes]
        self.workers: Mapping[WorkerId, FleetWorker] = {
            each.info.worker_id: each for each in here if not each.load.draining
        }
        self._match = match

    def holders(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """Returns the number of leading blocks of a prefix by worker, for workers that hold any."""
        if not self.workers:
            return {}
        namespace = next(iter(self.workers.values())).info.layout.model_fingerprint
        found = self._match(namespace, hashes)
        return {name: found[name] for name in found if name in self.workers}

    def hit_rate(self, hashes: Sequence[BlockHash]) -> float:
        """Share of a prefix that some worker holds."""
        return max(self.holders(hashes).values(), default=0) / len(hashes) if hashes else 0.0

    @property
    def used_share(self) -> float:
        """Share of all workers' blocks that requests hold, or that a cached prefix is in."""
        total = sum(each.info.num_blocks for each in self.workers.values())
        free = sum(each.load.blocks_free for each in self.workers.values())
        return 1 - free / total if total else 0.0


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """A prefix to query at its holder, or to read from it.

    Attributes:
        hashes: hashes of the blocks that the holder has, from the prefix's first one.
    """

    holder: WorkerInfo
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The worker that a prefix's KV is stored on.

    Attributes:
        hashes: hashes of all its blocks; those that the target holds are not sent.
    """

    target: WorkerInfo
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class PoolPlans:
    """Plans of a step, in the order of the batches.

    Attributes:
        query_plans: per batch; None if no worker holds any of its prefix.
        transfer_plans: per batch; None if a worker holds all of its prefix.
        groups: per batch, the workers that it runs on.
    """

    query_plans: tuple[QueryPlan | None, ...]
    transfer_plans: tuple[TransferPlan | None, ...]
    groups: tuple[tuple[WorkerId, ...], ...]


def gen_plans(
    batches: Sequence[Sequence[BlockHash]],
    degrees: Sequence[int],
    tree: PrefixTree,
    rng: random.Random,
) -> PoolPlans:
    """Plans holders to query, workers to store on and workers to compute for the batches of a step.

    Among holders of equally many blocks, the less loaded of two random ones is queried. New blocks
    go to the worker that holds most of their prefix, else to the worker with most free blocks, so
    that a prefix stays in one place. Batches run where the fewest bytes of KV and queries travel.

    Args:
        batches: hashes of the full blocks of each prompt, chained from the root on.
        degrees: number of workers per batch.

    Raises:
        ValueError: the degrees add up to more workers than there are.
    """
    if len(batches) != len(degrees) or min(degrees, default=1) < 1:
        raise ValueError("each batch needs a degree of at least 1")
    if sum(degrees) > len(tree.workers):
        raise ValueError(f"{sum(degrees)} workers wanted, {len(tree.workers)} are there")
    queries: list[QueryPlan | None] = []
    transfers: list[TransferPlan | None] = []
    traffic: list[BatchTraffic] = []
    for hashes, degree in zip(batches, degrees, strict=True):
        query = _query(hashes, tree, rng)
        transfer = _transfer(hashes, tree, query)
        queries.append(query)
        transfers.append(transfer)
        read = frozenset[WorkerId]() if query is None else frozenset({query.holder.worker_id})
        put: dict[WorkerId, int] = {}
        if transfer is not None:
            held = len(query.hashes) if query is not None else 0
            num_tokens = (len(hashes) - held) * transfer.target.layout.block_size
            put[transfer.target.worker_id] = -(-num_tokens // degree)
        traffic += [BatchTraffic(read, put)] * degree
    # The unit of volume does not affect the choice.
    chosen = iter(dispatch(traffic, sorted(tree.workers), 1).workers)
    groups = tuple(tuple(next(chosen) for _ in range(degree)) for degree in degrees)
    return PoolPlans(tuple(queries), tuple(transfers), groups)


def _query(hashes: Sequence[BlockHash], tree: PrefixTree, rng: random.Random) -> QueryPlan | None:
    holders = tree.holders(hashes)
    if not holders:
        return None
    most = max(holders.values())
    best = [tree.workers[name] for name in sorted(holders) if holders[name] == most]
    chosen = choose_holder(best, lambda each: (each.load.sending_bytes,), rng)
    return QueryPlan(chosen.info, tuple(hashes[:most]))


def _transfer(
    hashes: Sequence[BlockHash], tree: PrefixTree, query: QueryPlan | None
) -> TransferPlan | None:
    if query is not None:
        stored = len(query.hashes) == len(hashes)
        return None if stored else TransferPlan(query.holder, tuple(hashes))
    if not hashes:
        return None
    roomiest = max(
        tree.workers.values(), key=lambda each: (each.load.blocks_free, each.info.worker_id)
    )
    return TransferPlan(roomiest.info, tuple(hashes))
