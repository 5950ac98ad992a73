"""Who is asked, who stores and who computes, for batches over a pool."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import BlockHash, WorkerId, WorkerLoad
from kvmesh.pool.plans import PrefixTree, gen_plans
from tests.unit.policy.fleet_examples import worker_info

HASHES = [BlockHash(bytes([number]) * 16) for number in range(8)]


def tree_of(held: Mapping[str, int], **free: int) -> PrefixTree:
    """Workers with so many free blocks, some of which hold leading blocks of any prefix."""
    fleet = [
        FleetWorker(
            worker_info(name, num_blocks=100, publishes=True, model="m"),
            WorkerLoad(blocks_free=blocks, draining=name == "leaving"),
        )
        for name, blocks in free.items()
    ]

    def match(_namespace: str, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        return {WorkerId(name): min(blocks, len(hashes)) for name, blocks in held.items()}

    return PrefixTree("m", fleet, match)


def test_a_tree_says_what_is_held_by_those_who_stay() -> None:
    tree = tree_of({"a": 4, "leaving": 8, "stranger": 8}, a=50, b=100, leaving=10)
    assert tree.holders(HASHES) == {"a": 4}
    assert tree.hit_rate(HASHES) == 0.5
    assert tree.hit_rate([]) == 0
    assert tree.used_share == pytest.approx(0.25)
    nobody = tree_of({"a": 4})
    assert (nobody.holders(HASHES), nobody.used_share) == ({}, 0)


def test_who_holds_most_is_asked_stores_the_rest_and_computes() -> None:
    tree = tree_of({"a": 2, "b": 5}, a=100, b=10, c=100)
    plans = gen_plans([HASHES], [1], tree, random.Random(0))
    (query,), (transfer,) = plans.query_plans, plans.transfer_plans
    assert query is not None
    assert transfer is not None
    assert (query.holder.worker_id, query.hashes) == ("b", tuple(HASHES[:5]))
    assert (transfer.target.worker_id, transfer.hashes) == ("b", tuple(HASHES))
    assert plans.groups == (("b",),)


def test_what_nobody_holds_goes_where_there_is_room() -> None:
    plans = gen_plans([HASHES, []], [1, 1], tree_of({}, a=10, b=70), random.Random(0))
    assert plans.query_plans == (None, None)
    first, empty = plans.transfer_plans
    assert first is not None
    assert first.target.worker_id == "b"
    assert empty is None
    assert plans.groups == (("b",), ("a",))


def test_what_is_held_whole_is_stored_nowhere() -> None:
    plans = gen_plans([HASHES], [2], tree_of({"b": 8}, a=9, b=7, c=9), random.Random(0))
    assert plans.transfer_plans == (None,)
    assert len(set(plans.groups[0])) == 2
    assert "b" in plans.groups[0]


@pytest.mark.parametrize("degrees", [[1, 1], [0], [2], []])
def test_degrees_that_cannot_be_are_refused(degrees: list[int]) -> None:
    with pytest.raises(ValueError, match=r"a degree of at least 1|workers wanted"):
        gen_plans([HASHES], degrees, tree_of({}, a=1), random.Random(0))
