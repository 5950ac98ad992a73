"""Who is decided with whom, and when; every time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.policy.gathering import LOOKUP_S, Gathering, Seat
from kvmesh.policy.joint import MAX_JOINT

LATER = 10.0


def gathering(hold_s: float = 0.0, **holds: float) -> Gathering[str]:
    return Gathering(lambda item: holds.get(item, hold_s))


def come(waiting: Gathering[str], item: str, now: float = LATER) -> Seat:
    seat = waiting.arrive()
    waiting.ready(seat, item, now)
    return seat


def test_who_comes_alone_waits_for_nothing() -> None:
    waiting = gathering()
    assert waiting.closes_at is None
    come(waiting, "a")
    assert waiting.take(LATER) == ["a"]
    assert waiting.num_waiting == 0
    assert waiting.take(LATER) == []


def test_those_with_their_prefixes_wait_for_those_who_look_for_theirs() -> None:
    waiting = gathering()
    looking = waiting.arrive()
    come(waiting, "a")
    later = waiting.arrive()
    assert waiting.take(LATER) == []
    waiting.ready(looking, "b", LATER + 0.001)
    assert waiting.take(LATER + 0.001) == ["a", "b"], "and for no lookup that began later"
    assert waiting.num_waiting == 1
    waiting.ready(later, "c", LATER + 0.002)
    assert waiting.take(LATER + 0.002) == ["c"]


def test_a_lookup_that_takes_too_long_is_not_waited_for() -> None:
    waiting = gathering()
    waiting.arrive()
    come(waiting, "a")
    assert waiting.closes_at == LATER + LOOKUP_S
    come(waiting, "b", LATER + LOOKUP_S / 2)
    assert waiting.take(LATER + LOOKUP_S) == ["a", "b"]


@pytest.mark.parametrize("hold_s", [0.0, 0.5])
def test_a_lookup_that_is_given_up_keeps_nobody(hold_s: float) -> None:
    waiting = gathering(hold_s)
    looking = [waiting.arrive(), waiting.arrive()]
    come(waiting, "a")
    waiting.leave(looking[0])
    assert waiting.closes_at == LATER + LOOKUP_S
    waiting.leave(looking[1])
    assert waiting.closes_at == LATER + hold_s, "as if nobody else had asked"


def test_the_shortest_wait_counts() -> None:
    waiting = gathering(a=0.5, b=0.1, c=0.3)
    for item in "abc":
        come(waiting, item)
    assert waiting.closes_at == LATER + 0.1
    assert waiting.take(LATER + 0.1) == ["a", "b", "c"]


def test_so_many_are_decided_at_once_and_no_more() -> None:
    waiting = gathering(hold_s=1.0)
    names = [f"r{number}" for number in range(MAX_JOINT)]
    for each in names[:-1]:
        come(waiting, each)
    assert waiting.take(LATER) == []
    come(waiting, names[-1])
    assert waiting.take(LATER) == names


def test_who_hangs_up_is_not_decided_on() -> None:
    waiting = gathering(hold_s=1.0)
    gone = come(waiting, "a")
    come(waiting, "b")
    waiting.leave(gone)
    waiting.leave(gone)
    assert waiting.take(LATER + 1.0) == ["b"]


def test_all_hang_up() -> None:
    waiting = gathering(hold_s=1.0)
    for seat in (waiting.arrive(), come(waiting, "a")):
        waiting.leave(seat)
    assert waiting.closes_at is None
    assert waiting.num_waiting == 0


@pytest.mark.parametrize("fails_first", [True, False])
def test_those_who_wait_with_one_whose_question_fails_are_due(fails_first: bool) -> None:
    def hold_s(item: str) -> float:
        if (item == "a") is fails_first:
            raise LookupError("a bug")
        return 1.0

    waiting: Gathering[str] = Gathering(hold_s)
    looking = waiting.arrive()
    come(waiting, "a")
    with pytest.raises(LookupError):
        waiting.leave(looking) if fails_first else waiting.ready(looking, "b", LATER)
    waiting.leave(looking)
    assert waiting.take(LATER) == ["a"]
    assert waiting.num_waiting == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arl"), st.integers(0, 9), st.integers(0, 30))))
def test_everybody_is_decided_once_and_nobody_waits_too_long(
    steps: list[tuple[str, int, int]],
) -> None:
    hold_s, now = 0.03, 0.0
    waiting = gathering(hold_s)
    looking: list[Seat] = []
    ready: dict[Seat, float] = {}

    def take() -> None:
        taken = waiting.take(now)
        assert sorted(taken) == sorted(map(str, ready)) or not taken, "all or none"
        if taken:
            ready.clear()
        assert all(now < since + LOOKUP_S + hold_s for since in ready.values())

    for kind, which, after_ms in steps:
        due = waiting.closes_at
        now = min(now + after_ms / 1e3, due) if due is not None else now + after_ms / 1e3
        take()
        if kind == "a":
            looking.append(waiting.arrive())
        elif kind == "r" and looking:
            seat = looking.pop(which % len(looking))
            waiting.ready(seat, str(seat), now)
            ready[seat] = now
        elif kind == "l" and (seats := [*looking, *ready]):
            seat = seats[which % len(seats)]
            waiting.leave(seat)
            ready.pop(seat, None)
            looking = [each for each in looking if each != seat]
        take()
    assert waiting.num_waiting == len(looking) + len(ready)


def test_who_comes_when_it_is_full_is_not_asked_about_and_changes_nothing() -> None:
    waiting = gathering(hold_s=1.0, late=-5.0)
    for number in range(MAX_JOINT):
        come(waiting, f"r{number}")
    come(waiting, "late", LATER + 0.5)
    assert waiting.closes_at == LATER


def test_the_wait_of_those_who_are_gone_is_not_that_of_the_next() -> None:
    waiting = gathering(a=0.0, b=0.5)
    waiting.arrive()
    come(waiting, "a", 1.0)
    assert waiting.take(1.0 + LOOKUP_S) == ["a"]
    come(waiting, "b", 2.0)
    assert waiting.closes_at == 2.0 + LOOKUP_S, "the first lookup still runs"
    third = gathering(a=0.0, b=0.5)
    come(third, "a", 1.0)
    assert third.take(1.0) == ["a"]
    come(third, "b", 2.0)
    assert third.closes_at == 2.5


def test_nobody_is_held_after_the_last_one_left() -> None:
    waiting = gathering(hold_s=1.0)
    looking, gone = waiting.arrive(), come(waiting, "a")
    waiting.leave(gone)
    waiting.leave(looking)
    assert waiting.closes_at is None
    come(waiting, "b", 20.0)
    assert waiting.closes_at == 21.0
