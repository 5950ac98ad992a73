import bisect
import random

import pytest

from kvmesh.kv.bit_tree import LIMIT, BitTree


@pytest.mark.parametrize("bound", [70, 5_000, LIMIT])
def test_against_a_sorted_list(bound: int) -> None:
    rng = random.Random(bound)
    tree, members = BitTree(), list[int]()
    for _ in range(2_000):
        item = rng.randrange(bound)
        at = bisect.bisect_left(members, item)
        there = at < len(members) and members[at] == item
        assert (item in tree) == there
        before = bisect.bisect_right(members, item)
        assert tree.at_or_before(item) == (members[before - 1] if before else None)
        if there and rng.random() < 0.9:
            tree.remove(item)
            members.remove(item)
        else:
            tree.add(item)
            members[at : at + there] = [item]


def test_the_ends_are_members_like_others() -> None:
    tree = BitTree()
    tree.add(0)
    tree.add(LIMIT - 1)
    assert tree.at_or_before(LIMIT - 1) == LIMIT - 1
    assert tree.at_or_before(LIMIT - 2) == 0
    tree.remove(LIMIT - 1)
    assert tree.at_or_before(LIMIT - 1) == 0


def test_what_is_not_there_cannot_be_removed() -> None:
    with pytest.raises(AssertionError, match="not in the set"):
        BitTree().remove(3)
