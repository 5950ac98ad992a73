from __future__ import annotations

import pytest

from kvmesh.sim.events import EventQueue
from kvmesh.sim.link import SharedLink


def run(*sends: tuple[float, float], change: tuple[float, float] | None = None) -> list[float]:
    """End of each transfer of (start, size) on a link of 10 bytes per second."""
    events = EventQueue()
    link = SharedLink(events, 10.0)
    ends = [0.0] * len(sends)

    def start(index: int, size: float) -> None:
        def done() -> None:
            ends[index] = events.now()

        link.send(size, done)

    for index, (at, size) in enumerate(sends):
        events.at(at, lambda index=index, size=size: start(index, size))  # type: ignore[misc]
    if change is not None:
        moment, bandwidth = change
        events.at(moment, lambda: link.set_bandwidth(bandwidth))
    events.run(lambda: False)
    assert link.bytes_left == 0
    carried, busy = link.use_until_now()
    assert carried == pytest.approx(sum(size for _, size in sends))
    assert busy <= events.now()
    return ends


def test_alone_a_transfer_has_all_of_it() -> None:
    assert run((1.0, 50.0)) == pytest.approx([6.0])


def test_two_share_evenly() -> None:
    assert run((0.0, 50.0), (0.0, 50.0)) == pytest.approx([10.0, 10.0])


def test_one_that_leaves_frees_its_share() -> None:
    # 20 each until 4 s, then 30 alone.
    assert run((0.0, 50.0), (0.0, 20.0)) == pytest.approx([7.0, 4.0])


def test_one_that_comes_later_takes_its_share() -> None:
    assert run((0.0, 50.0), (2.0, 50.0)) == pytest.approx([8.0, 10.0])


def test_a_change_of_bandwidth_is_for_the_rest() -> None:
    assert run((0.0, 50.0), change=(2.0, 5.0)) == pytest.approx([8.0])


def test_nothing_takes_no_time() -> None:
    assert run((3.0, 0.0)) == pytest.approx([3.0])
