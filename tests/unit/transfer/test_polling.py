"""Looks for the next frame: made while they pay."""

from __future__ import annotations

from kvmesh.transfer.polling import Polling


def looks_of(polling: Polling, num_frames: int, came: bool) -> int:
    """How many of so many frames were looked for, in vain or not."""
    count = 0
    for _ in range(num_frames):
        if polling.next_s() > 0:
            polling.saw(came)
            count += 1
    return count


def test_looks_that_pay_are_made_for_every_frame() -> None:
    polling = Polling(1e-4)
    assert polling.next_s() == 1e-4
    polling.saw(True)
    assert looks_of(polling, 100, came=True) == 100


def test_looks_for_nothing_become_rare_and_one_that_pays_brings_them_back() -> None:
    polling = Polling(1e-4)
    assert looks_of(polling, 1000, came=False) < 25
    rare = looks_of(polling, 6400, came=False)
    assert rare == 100
    while polling.next_s() == 0:
        pass
    polling.saw(True)
    assert looks_of(polling, 10, came=True) == 10


def test_nobody_looks_where_it_is_not_wanted() -> None:
    assert looks_of(Polling(0.0), 100, came=True) == 0
