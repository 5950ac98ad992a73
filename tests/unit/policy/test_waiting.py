from __future__ import annotations

from kvmesh.core.types import WorkerLoad
from kvmesh.policy.waiting import Waiting, split_waiting


def test_who_has_a_reservation_waits_for_prefill() -> None:
    assert split_waiting(3, 0, [WorkerLoad()]) == Waiting(3, 0)


def test_the_rest_waits_for_what_fills_the_slots() -> None:
    loads = [WorkerLoad(decode_running=3, decode_reserved=1)]
    assert split_waiting(0, 8, loads) == Waiting(2, 6)
    assert split_waiting(0, 8, []) == Waiting(0, 8)
