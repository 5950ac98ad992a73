from __future__ import annotations

import pytest

from kvmesh.core.types import WorkerLoad
from kvmesh.policy.waiting import Demand, Looking, Waiting, looking, split_waiting


@pytest.mark.parametrize(
    ("asked", "reserved", "behind", "told"),
    [
        (0, 0, 0, Looking()),
        (4, 3, 0, Looking(3, 1)),
        (2, 2, 10, Looking(12, 0)),
        (2, 0, 10, Looking(0, 12)),
        (4, 1, 4, Looking(2, 6)),
        (0, 0, 5, Looking(0, 5)),
    ],
)
def test_who_has_not_asked_yet_waits_for_what_those_before_it_wait_for(
    asked: int, reserved: int, behind: int, told: Looking
) -> None:
    assert looking(asked, reserved, behind, 0, 0) == told


def test_who_had_no_plan_yet_waits_for_the_clusters_as_those_who_had() -> None:
    assert looking(8, 8, 4, 6, 2) == Looking(12, 0, 4)
    assert looking(8, 2, 0, 8, 8) == Looking(2, 6, 2)
    demand = Demand({"a": Looking(12, 1, 4), "b": Looking(3, 2, 3)})
    assert (demand.remote, demand.local, demand.reserved, demand.unreserved) == (7, 8, 15, 3)


def test_who_has_a_reservation_waits_for_prefill() -> None:
    assert split_waiting(3, 0, [WorkerLoad()]) == Waiting(3, 0)


def test_the_rest_waits_for_what_fills_the_slots() -> None:
    loads = [WorkerLoad(decode_running=3, decode_reserved=1)]
    assert split_waiting(0, 8, loads) == Waiting(2, 6)
    assert split_waiting(0, 8, []) == Waiting(0, 8)
