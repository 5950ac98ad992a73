from __future__ import annotations

import random

import pytest

from kvmesh.core.types import WorkerId
from kvmesh.policy.holders import Holders, held_by, longest_holders

NAMES = [WorkerId(f"w{index:02}") for index in range(70)]
PLACES = {name: place for place, name in enumerate(NAMES)}


def of(blocks: dict[WorkerId, int]) -> Holders:
    levels = {
        count: sum(1 << PLACES[name] for name, each in blocks.items() if each == count)
        for count in set(blocks.values())
    }
    return Holders(NAMES, PLACES, sorted(levels.items(), reverse=True))


def test_it_is_the_map_that_it_was_made_from() -> None:
    rng = random.Random(3)
    blocks = {name: rng.randint(1, 5) for name in rng.sample(NAMES, 40)}
    holders = of(blocks)
    assert holders == blocks
    assert len(holders) == 40
    assert [holders.get(name, 0) for name in NAMES] == [blocks.get(name, 0) for name in NAMES]
    with pytest.raises(KeyError):
        holders[WorkerId("stranger")]


def test_nobody() -> None:
    assert not of({})
    assert of({}).longest(3) == []


def test_what_some_hold_is_read_at_once_as_from_a_plain_map() -> None:
    rng = random.Random(5)
    blocks = {name: rng.randint(1, 3) for name in rng.sample(NAMES, 30)}
    asked = [*rng.sample(NAMES, 20), WorkerId("stranger")]
    assert held_by(of(blocks), asked) == held_by(blocks, asked)
    assert held_by(blocks, asked) == [blocks.get(name, 0) for name in asked]
    assert held_by(of({}), asked) == held_by(None, asked) == [0] * len(asked)


@pytest.mark.parametrize("count", [1, 7, 32, 100])
def test_the_longest_are_those_of_a_plain_map(count: int) -> None:
    rng = random.Random(count)
    blocks = {name: rng.randint(1, 3) for name in rng.sample(NAMES, 50)}
    assert of(blocks).longest(count) == longest_holders(blocks, count)
    assert len(longest_holders(blocks, count)) == min(count, 50)
