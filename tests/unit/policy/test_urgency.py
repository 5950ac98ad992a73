from __future__ import annotations

import pytest

from kvmesh.policy.urgency import most_urgent, num_usable


def test_who_can_be_in_time_comes_before_who_cannot() -> None:
    slack = {"easy": 9.0, "late": -1.0, "soon": 0.5, "very late": -5.0}
    names = list(slack)
    assert most_urgent(names, lambda name: slack[name], 3) == ["soon", "easy", "very late"]
    assert most_urgent(names, lambda name: slack[name], 9)[-1] == "late"


def test_who_is_late_is_not_left_behind_for_ever() -> None:
    """Two more that can be in time come before every plan for two."""
    waiting = ["long", "longer"]
    planned: list[str] = []
    for number in range(3):
        waiting += [f"short {number}.{each}" for each in range(2)]
        for each in most_urgent(waiting, lambda name: -9.0 if "long" in name else 1.0, 2):
            waiting.remove(each)
            planned.append(each)
    assert planned == ["short 0.0", "long", "short 0.1", "longer", "short 1.0", "short 1.1"]
    assert most_urgent([], lambda _: 1.0, 2) == []


def test_equals_keep_their_order() -> None:
    assert most_urgent("cab", lambda _: 1.0, 2) == ["c", "a"]


@pytest.mark.parametrize(("num_free", "usable"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (8, 6)])
def test_some_workers_are_left_to_who_comes_next(num_free: int, usable: int) -> None:
    assert num_usable(num_free) == usable
