"""Which workers of a group must reach each other, and which of them may serve. Pure.

A prefill worker hands its KV to decode workers of its group, so each such pair is checked before
the group uses it: connected and greeted (P/D-Serve 3.2: gather, connect to peers and verify).
Tests: tests/unit/policy/test_peer_checks.py.
"""

from __future__ import annotations

import enum
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvmesh.core.turns import Parts, is_turn_over
from kvmesh.core.types import Role, WorkerId

FANOUT = 16
"""Receivers that a sender checks, and senders that check a receiver: at least this many, or all.

So all pairs of groups with at most 16 workers on each side are checked, and in a larger group each
worker takes part in 16 to about 32 checks, if both sides are of similar size.
"""

PAIRS_IN_A_TURN = 1_200
"""Pairs that are processed in one part, which takes one to two milliseconds."""

_SENDS_TO = {
    Role.PREFILL: (Role.DECODE, Role.HYBRID, Role.SPARE),
    Role.HYBRID: (Role.DECODE, Role.SPARE),
    Role.SPARE: (Role.DECODE, Role.HYBRID),
}
"""The roles to which each role may have to send.

Hybrid workers serve alone and need no other hybrid. Spares are checked before they are needed.
"""

Pair: TypeAlias = tuple[WorkerId, WorkerId]
"""A sender and a receiver."""


class CheckState(enum.Enum):
    """State of the check of a pair."""

    PENDING = "pending"
    VERIFIED = "verified"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Party:
    """A worker of a group, or a spare for it.

    Attributes:
        serves: whether it takes requests of this group already.
    """

    name: WorkerId
    role: Role
    serves: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """Which workers of a group take requests.

    Attributes:
        open: those that do.
        waiting: those that wait for a check.
        failed: those that cannot exchange KV with others, each with the pairs that failed.
    """

    open: frozenset[WorkerId]
    waiting: frozenset[WorkerId]
    failed: Mapping[WorkerId, tuple[Pair, ...]]


def pairs_to_check(parties: Iterable[Party]) -> Parts[set[Pair]]:
    """Returns the pairs to check: all of a small group, a bounded part of a large one.

    Senders and receivers lie on a ring by the hash of their names. A sender checks the next
    receivers on the ring, and a receiver is checked by the senders before it, which are mostly the
    same pairs. So a new worker changes few other pairs.
    """
    by_role: dict[Role, list[WorkerId]] = {role: [] for role in Role}
    for each in parties:
        by_role[each.role].append(each.name)
    pairs: set[Pair] = set()
    for role, roles in _SENDS_TO.items():
        ring = _ring(name for receiving in roles for name in by_role[receiving])
        for number, sender in enumerate(by_role[role]):
            if is_turn_over(number):
                yield
            pairs.update((sender, receiver) for receiver in _on_ring(ring, sender))
    for receiving in (Role.DECODE, Role.HYBRID, Role.SPARE):
        sending = [role for role, roles in _SENDS_TO.items() if receiving in roles]
        ring = _ring(name for role in sending for name in by_role[role])
        for number, receiver in enumerate(by_role[receiving]):
            if is_turn_over(number):
                yield
            before = _on_ring(ring, receiver, backwards=True)
            pairs.update((sender, receiver) for sender in before)
    return pairs


_Ring = list[tuple[int, WorkerId]]


def _ring(names: Iterable[WorkerId]) -> _Ring:
    return sorted((_place(name), name) for name in names)


def _on_ring(ring: _Ring, name: WorkerId, *, backwards: bool = False) -> Iterator[WorkerId]:
    """Yields the next `FANOUT` names on the ring after this one, or those before it."""
    start = bisect_left(ring, (_place(name), name))
    for number in range(min(FANOUT, len(ring))):
        index = start - 1 - number if backwards else start + number
        yield ring[index % len(ring)][1]


def _place(name: WorkerId) -> int:
    return zlib.crc32(name.encode())


def admit(parties: Sequence[Party], states: Mapping[Pair, CheckState]) -> Parts[Admission]:
    """Decides which workers of a group take requests.

    No two open workers have a failed pair, so any of them may be chosen for a request. If a pair
    is verified, at least one such pair is open. Workers with the smallest share of failed pairs
    come first, so a worker that nobody reaches does not close the others. A worker that serves
    already does not wait for new peers; a new one waits until all its pairs with open workers are
    verified. A worker without peers serves alone.

    Args:
        parties: the workers of the group; spares are ignored.
        states: the pairs to check.
    """
    members = {each.name: each for each in parties if each.role is not Role.SPARE}
    tally = _Tally(members)
    yield from tally.count(states)
    able: dict[WorkerId, None] = {}
    failed: dict[WorkerId, tuple[Pair, ...]] = {}
    for number, name in enumerate((yield from tally.order())):
        if is_turn_over(number):
            yield
        conflicts = tuple(p for p in tally.failing[name] if not able.keys().isdisjoint(p))
        if conflicts:
            failed[name] = conflicts
        else:
            able[name] = None
    taking = {name for name in able if members[name].serves}
    for number, name in enumerate(able):
        if is_turn_over(number):
            yield
        if tally.pending[name].isdisjoint(taking):
            taking.add(name)
    return Admission(frozenset(taking), frozenset(able) - taking, failed)


class _Tally:
    """The states of the pairs, by worker.

    Attributes:
        failing: the failed pairs of each worker.
        pending: the peers with which each worker waits for a check.
    """

    def __init__(self, members: Mapping[WorkerId, Party]) -> None:
        self._members = members
        self.failing: dict[WorkerId, list[Pair]] = {name: [] for name in members}
        self.pending: dict[WorkerId, set[WorkerId]] = {name: set() for name in members}
        self._num_pairs = dict.fromkeys(members, 0)
        self._verified: list[Pair] = []

    def count(self, states: Mapping[Pair, CheckState]) -> Parts[None]:
        """Adds the pairs whose workers are both members."""
        for number, (pair, state) in enumerate(states.items()):
            if is_turn_over(number, PAIRS_IN_A_TURN):
                yield
            if pair[0] in self._members and pair[1] in self._members:
                self._add(pair, state)

    def _add(self, pair: Pair, state: CheckState) -> None:
        if state is CheckState.VERIFIED:
            self._verified.append(pair)
        for name, other in (pair, pair[::-1]):
            self._num_pairs[name] += 1
            if state is CheckState.FAILED:
                self.failing[name].append(pair)
            elif state is CheckState.PENDING:
                self.pending[name].add(other)

    def order(self) -> Parts[list[WorkerId]]:
        """The workers: the verified pair with the fewest failures, then by failures."""
        rank: dict[WorkerId, tuple[float, int, bool, str]] = {}
        for number, name in enumerate(self._members):
            if is_turn_over(number):
                yield
            rank[name] = self._rank(name)
        order = sorted(rank, key=rank.__getitem__)
        if not self._verified:
            return order
        place = {name: number for number, name in enumerate(order)}
        most = (len(order), self._verified[0])
        for number, pair in enumerate(self._verified):
            if is_turn_over(number, PAIRS_IN_A_TURN):
                yield
            most = min(most, (max(place[pair[0]], place[pair[1]]), pair))
        best = most[1]
        return [*best, *(name for name in order if name not in best)]

    def _rank(self, name: WorkerId) -> tuple[float, int, bool, str]:
        # Of a single pair, the prefill worker stays: it can serve alone.
        num_failed = len(self.failing[name])
        is_decode = self._members[name].role is Role.DECODE
        return num_failed / max(self._num_pairs[name], 1), num_failed, is_decode, name
