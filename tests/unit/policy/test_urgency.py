from __future__ import annotations

import pytest

from kvmesh.policy.urgency import most_urgent, num_usable


def test_who_can_be_in_time_comes_before_who_cannot() -> None:
    slack = {"late": -1.0, "easy": 9.0, "soon": 0.5, "very late": -5.0}
    assert most_urgent(slack, lambda name: slack[name], 3) == ["soon", "easy", "very late"]
    assert most_urgent(slack, lambda name: slack[name], 9)[-1] == "late"


def test_equals_keep_their_order() -> None:
    assert most_urgent("cab", lambda _: 1.0, 2) == ["c", "a"]


@pytest.mark.parametrize(("num_free", "usable"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (8, 6)])
def test_some_workers_are_left_to_who_comes_next(num_free: int, usable: int) -> None:
    assert num_usable(num_free) == usable
