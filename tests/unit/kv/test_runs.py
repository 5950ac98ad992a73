from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.kv.runs import consecutive_runs


def test_runs_follow_the_order_of_the_list() -> None:
    assert consecutive_runs([4, 5, 6, 12, 13, 7]) == [(4, 3), (12, 2), (7, 1)]
    assert consecutive_runs([3, 2, 1]) == [(3, 1), (2, 1), (1, 1)]
    assert consecutive_runs([]) == []


@given(st.lists(st.integers(0, 30), max_size=30))
def test_runs_spell_the_list_and_cannot_be_joined(blocks: list[int]) -> None:
    runs = consecutive_runs(blocks)
    assert [first + i for first, count in runs for i in range(count)] == blocks
    assert all(a[0] + a[1] != b[0] for a, b in pairwise(runs))
