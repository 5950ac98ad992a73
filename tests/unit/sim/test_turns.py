from __future__ import annotations

import pytest

from kvmesh.policy.fair_share import MIN_HEADS
from kvmesh.sim.requests import SimRequest
from kvmesh.sim.turns import Turns
from tests.unit.sim.examples import request


def test_while_nobody_looks_in_vain_nobody_waits() -> None:
    turns = Turns()
    for number in range(9):
        each = request(number)
        turns.enter(each)
        assert turns.wait(each, lambda: None)
        assert turns.pace(each) == 1.0
        turns.leave(each, 0.0, placed=True)


def test_those_behind_are_called_in_order_as_those_before_leave() -> None:
    turns = Turns()
    waiting = [request(number) for number in range(MIN_HEADS + 3)]
    called: list[SimRequest] = []
    turns.enter(waiting[0])
    turns.missed(waiting[0], remote=False)
    for each in waiting[1:]:
        turns.enter(each)
    rates = [1 / turns.pace(each) for each in waiting[:MIN_HEADS]]
    assert sum(rates) == pytest.approx(len(waiting)), "as often as if all might look"
    assert rates == sorted(rates, reverse=True)
    may = [turns.wait(each, lambda each=each: called.append(each)) for each in waiting]  # type: ignore[misc]
    assert may == [True] * MIN_HEADS + [False] * 3
    turns.leave(waiting[1], 0.0, placed=False)
    assert called == [waiting[MIN_HEADS]]
    turns.leave(waiting[0], 0.0, placed=True)
    assert called == waiting[MIN_HEADS:], "the place that it left, and one more since it was placed"
    for each in waiting:
        turns.leave(each, 0.0, placed=False)


def test_who_has_tokens_already_waits_for_nobody() -> None:
    turns = Turns()
    first, moved = request(0), request(1)
    turns.missed(first, remote=None)
    moved.generated = 3
    turns.enter(moved)
    turns.missed(moved, remote=False)
    assert turns.wait(moved, lambda: None)
    assert turns.pace(first) == turns.pace(moved) == 1.0, "only the first one is in the queue"
