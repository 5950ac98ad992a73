from __future__ import annotations

from kvmesh.core.silence import Threads, ThreadTimes
from kvmesh.core.starved_time import LOOK_S, StarvedTime


def threads(**waited: float) -> Threads:
    return {ord(name): ThreadTimes("R", 1.0, wait_s) for name, wait_s in waited.items()}


def test_between_two_looks_the_thread_that_waited_longest_counts() -> None:
    told: list[Threads] = []
    starved = StarvedTime(lambda: told[-1])
    looks: list[tuple[Threads, float]] = [
        (threads(a=5.0, b=1.0), 0.0),  # what was before is not of late
        (threads(a=5.5, b=3.0), 2.0),
        (threads(a=6.5, b=3.0, c=9.0), 3.0),  # a new thread has not waited yet
        ({}, 3.0),  # where the kernel tells nothing, nothing counts
    ]
    for number, (now, total_s) in enumerate(looks):
        told.append(now)
        assert starved.total_s(number * LOOK_S) == total_s


def test_it_does_not_look_all_the_time() -> None:
    looks: list[Threads] = []

    def read() -> Threads:
        looks.append({})
        return {}

    starved = StarvedTime(read)
    for hundredth in range(100):
        starved.total_s(hundredth / 100)
    assert len(looks) == 4
