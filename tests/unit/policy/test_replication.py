from __future__ import annotations

import random
from collections import Counter

from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.replication import choose_copy, plan_copies
from kvmesh.policy.segment_tree import Segment

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def segment(reads: float, *holders: WorkerId) -> Segment:
    return Segment(BlockHash(b"s"), None, reads, copies=dict.fromkeys(holders, 0.0))


class TestCopies:
    def test_from_the_overloaded_to_the_least_loaded(self) -> None:
        copies = plan_copies([segment(60, A)], {A: 90.0, B: 30.0, C: 0.0})
        assert [(c.source, c.target) for c in copies] == [(A, C)]

    def test_a_balanced_pool_copies_nothing(self) -> None:
        assert plan_copies([segment(30, A)], {A: 30.0, B: 30.0, C: 28.0}) == []

    def test_the_target_holds_no_copy_yet(self) -> None:
        copies = plan_copies([segment(60, A, C)], {A: 90.0, B: 10.0, C: 0.0})
        assert [c.target for c in copies] == [B]
        assert plan_copies([segment(60, A, B, C)], {A: 90.0, B: 10.0, C: 0.0}) == []

    def test_planned_copies_count(self) -> None:
        hitters = [segment(20, A) for _ in range(4)]
        copies = plan_copies(hitters, {A: 80.0, B: 0.0, C: 0.0})
        assert {c.target for c in copies} == {B, C}

    def test_a_copy_takes_its_share_and_no_more_than_evens_two_out(self) -> None:
        hitters = [segment(60, A), segment(60, A), segment(10, A), segment(10, B)]
        copies = plan_copies(hitters, {A: 90.0, B: 30.0, C: 0.0})
        # 30 of 60 go to C; of the next 60 B gets 15, which makes 45 of both, below the limit of 46.
        assert [(c.source, c.target) for c in copies] == [(A, C), (A, B)]

    def test_all_holders_are_relieved_alike(self) -> None:
        hitters = [segment(90, A, B), segment(60, A), segment(60, B)]
        copies = plan_copies(hitters, {A: 90.0, B: 90.0, C: 0.0})
        # 15 less each; then A and C meet at 52.5, and of the two A comes first by name.
        assert [(c.source, c.target) for c in copies] == [(B, C), (A, C), (B, A)]

    def test_who_has_no_room_gets_no_copy(self) -> None:
        loads = {A: 90.0, B: 30.0, C: 0.0}
        copies = plan_copies([segment(60, A)], loads, fits=lambda _, worker: worker != C)
        assert [c.target for c in copies] == [B]
        assert plan_copies([segment(60, A)], loads, fits=lambda *_: False) == []
        assert plan_copies([segment(60, A)], {}) == []

    def test_dead_holders_are_no_source(self) -> None:
        assert plan_copies([segment(60, WorkerId("dead"))], {A: 90.0, B: 0.0}) == []

    def test_traffic_is_bounded(self) -> None:
        hitters = [segment(10, A) for _ in range(20)]
        assert len(plan_copies(hitters, {A: 200.0, B: 0.0, C: 0.0}, max_copies=3)) == 3


class TestChoice:
    def test_the_less_loaded_of_two(self) -> None:
        hot = segment(1, A, B)
        assert choose_copy(hot, {A: 5.0, B: 1.0}, random.Random(0)) == B

    def test_only_live_holders_are_read(self) -> None:
        hot = segment(1, A, B)
        assert choose_copy(hot, {A: 5.0}, random.Random(0)) == A
        assert choose_copy(hot, {C: 5.0}, random.Random(0)) is None

    def test_two_choices_spread_the_reads(self) -> None:
        holders = [WorkerId(f"w{i}") for i in range(8)]
        hot = segment(1, *holders)
        loads = dict.fromkeys(holders, 0.0)
        rng = random.Random(7)
        for _ in range(8000):
            chosen = choose_copy(hot, loads, rng)
            assert chosen is not None
            loads[chosen] += 1
        counts = Counter(loads)
        assert max(counts.values()) - min(counts.values()) < 10
