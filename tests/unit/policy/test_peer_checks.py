from __future__ import annotations

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.turns import at_once
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.peer_checks import (
    FANOUT,
    Admission,
    CheckState,
    Pair,
    Party,
    admit,
    pairs_to_check,
)

PENDING, VERIFIED, FAILED = CheckState.PENDING, CheckState.VERIFIED, CheckState.FAILED
SHORT = {"p": Role.PREFILL, "d": Role.DECODE, "h": Role.HYBRID, "s": Role.SPARE}


def party(name: str, *, serves: bool = False) -> Party:
    return Party(WorkerId(name), SHORT[name[0]], serves)


def parties(names: str, serving: str = "") -> list[Party]:
    return [party(name, serves=name in serving.split()) for name in names.split()]


def pair(words: str) -> Pair:
    sender, receiver = words.split(">")
    return WorkerId(sender), WorkerId(receiver)


def admitted(
    names: str, serving: str = "", *, failed: str = "", pending: str = ""
) -> tuple[str, str, str]:
    """Who takes requests, who waits, who failed; pairs that are not named are verified."""
    members = parties(names, serving)
    states = dict.fromkeys(at_once(pairs_to_check(members)), VERIFIED)
    for words, state in ((failed, FAILED), (pending, PENDING)):
        for each in words.split():
            assert pair(each) in states, "it is one to check"
            states[pair(each)] = state
    found = at_once(admit(members, states))
    return tuple(" ".join(sorted(each)) for each in (found.open, found.waiting, found.failed))  # type: ignore[return-value]


def test_prefill_reaches_decode_and_hybrids_serve_alone() -> None:
    assert at_once(pairs_to_check(parties("p1 p2 d1 d2"))) == {
        *map(pair, ("p1>d1", "p1>d2", "p2>d1", "p2>d2"))
    }
    assert at_once(pairs_to_check(parties("h1 h2 h3"))) == set()
    assert at_once(pairs_to_check(parties("p1 h1 d1"))) == {*map(pair, ("p1>d1", "p1>h1", "h1>d1"))}
    assert at_once(pairs_to_check(parties("p1 d1 s1 s2"))) == {
        *map(pair, ("p1>d1", "p1>s1", "p1>s2", "s1>d1", "s2>d1"))
    }


def test_a_worker_that_nobody_reaches_does_not_close_the_others() -> None:
    assert admitted("p1 p2 d1 d2", failed="p1>d1 p2>d1") == ("d2 p1 p2", "", "d1")
    assert admitted("p1 p2 d1 d2", failed="p1>d1 p1>d2") == ("d1 d2 p2", "", "p1")
    assert admitted("p1 d1 d2 d3", failed="p1>d1 p1>d2") == ("d3 p1", "", "d1 d2")
    everyone = "p1>d1 p1>d2 p1>d3 p1>d4"
    assert admitted("p1 p2 d1 d2 d3 d4", "p1", failed=everyone) == ("d1 d2 d3 d4 p2", "", "p1")


def test_one_pair_that_fails_leaves_a_worker_that_serves_alone() -> None:
    assert admitted("p1 d1", failed="p1>d1") == ("p1", "", "d1")
    assert admitted("p1 p2 d1 d2", failed="p1>d2") == ("d1 p1 p2", "", "d2")


def test_a_new_worker_waits_and_those_that_serve_do_not() -> None:
    assert admitted("p1 d1 d2", "p1 d1", pending="p1>d2") == ("d1 p1", "d2", "")
    assert admitted("p1 p2 d1", "p1 d1", pending="p2>d1") == ("d1 p1", "p2", "")
    assert admitted("p1 d1", "p1 d1", pending="p1>d1") == ("d1 p1", "", "")
    assert admitted("p1 d1", pending="p1>d1") == ("p1", "d1", "")
    assert admitted("h1 h2") == ("h1 h2", "", "")


STATES = st.sampled_from(CheckState)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Party], dict[Pair, CheckState]]:
    letters = draw(st.lists(st.sampled_from("pdhs"), min_size=1, max_size=9))
    members = [
        party(f"{letter}{number}", serves=draw(st.booleans()))
        for number, letter in enumerate(letters)
    ]
    return members, {each: draw(STATES) for each in sorted(at_once(pairs_to_check(members)))}


def is_split(found: Admission, members: list[Party]) -> bool:
    parts = [*found.open, *found.waiting, *found.failed]
    return Counter(parts) == Counter(each.name for each in members if each.role is not Role.SPARE)


@given(groups())
def test_open_workers_reach_each_other(group: tuple[list[Party], dict[Pair, CheckState]]) -> None:
    members, states = group
    found = at_once(admit(members, states))
    serving = {each.name for each in members if each.serves}
    assert is_split(found, members), "each worker has one state"
    within = {pair: state for pair, state in states.items() if found.open.issuperset(pair)}
    assert FAILED not in within.values(), "no two open workers cannot exchange KV"
    for (sender, receiver), state in within.items():
        assert state is VERIFIED or {sender, receiver} <= serving, "nobody new is taken unchecked"
    able = found.open | found.waiting
    for name, reasons in found.failed.items():
        assert reasons
        for each in reasons:
            assert name in each
            assert states[each] is FAILED
            assert able & {*each}, "a worker that serves, or will, is the reason"
    for name in found.waiting:
        assert any(
            state is PENDING and name in pair and {*pair} - {name} <= found.open
            for pair, state in states.items()
        ), "nobody waits for nothing"
    spares = {each.name for each in members if each.role is Role.SPARE}
    if any(s is VERIFIED and spares.isdisjoint(p) for p, s in states.items()):
        assert any(s is VERIFIED and able.issuperset(p) for p, s in states.items())
    if FAILED not in states.values():
        assert not found.failed
        assert serving - spares <= found.open, "nobody that serves stops for a new peer"


@given(groups())
def test_when_nothing_is_pending_nobody_waits(
    group: tuple[list[Party], dict[Pair, CheckState]],
) -> None:
    members, states = group
    done = {pair: FAILED if state is FAILED else VERIFIED for pair, state in states.items()}
    assert not at_once(admit(members, done)).waiting


def test_large_groups_check_a_bounded_part_which_one_more_worker_hardly_changes() -> None:
    size = 500
    members = [party(f"{letter}{number}") for letter in "pd" for number in range(size)]
    pairs = at_once(pairs_to_check(members))
    senders, receivers = Counter(s for s, _ in pairs), Counter(r for _, r in pairs)
    for counts in (senders, receivers):
        assert len(counts) == size, "everyone takes part"
        assert min(counts.values()) >= FANOUT
        assert max(counts.values()) <= 16 * FANOUT
    assert len(pairs) <= 2 * FANOUT * size
    changed = pairs ^ at_once(pairs_to_check([*members, party("d-new")]))
    assert len(changed) <= 6 * FANOUT


def test_a_thousand_workers_are_decided_on_in_moments() -> None:
    members = [party(f"{letter}{number}") for letter in "pd" for number in range(500)]
    started = time.process_time()
    states = dict.fromkeys(at_once(pairs_to_check(members)), VERIFIED)
    assert at_once(admit(members, states)).open == {each.name for each in members}
    assert time.process_time() - started < 1.0


@given(st.integers(1, 40), st.integers(1, 40))
def test_everyone_is_checked_by_as_many_as_there_are(num_prefill: int, num_decode: int) -> None:
    members = [
        *(party(f"p{number}") for number in range(num_prefill)),
        *(party(f"d{number}") for number in range(num_decode)),
    ]
    pairs = at_once(pairs_to_check(members))
    for number in range(num_prefill):
        told = sum(sender == f"p{number}" for sender, _ in pairs)
        assert told >= min(FANOUT, num_decode)
    for number in range(num_decode):
        told = sum(receiver == f"d{number}" for _, receiver in pairs)
        assert told >= min(FANOUT, num_prefill)
