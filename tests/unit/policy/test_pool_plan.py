from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.core.pool import PoolMember, PoolReport
from kvmesh.core.types import BlockHash, Endpoint, Role, WorkerId
from kvmesh.policy.heat import HeatTable
from kvmesh.policy.hot_runs import HotRun, held_runs, hot_runs, leaves
from kvmesh.policy.pool_plan import (
    CopyLimits,
    PoolPlacement,
    plan_cluster_copies,
    plan_hints,
    plan_prefix_copies,
    reads_cv,
)
from kvmesh.policy.replication import CopyReason
from kvmesh.policy.segments import home
from tests.unit.policy.test_heat import SIZE, name, prefix

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
MUCH = CopyLimits(1e12)
BLOCK_BYTES = 100


def member(
    worker: WorkerId, read_blocks: float, room: int = 1000, *, leaving: bool = False
) -> PoolMember:
    report = PoolReport(Role.PREFILL, Endpoint("h", 1), BLOCK_BYTES, room, 0, leaving)
    return PoolMember(worker, 1, "east", "m", report, read_blocks)


def runs_of(reads: dict[str, float], min_reads: float = 1) -> list[HotRun]:
    table = HeatTable(SIZE, 1000)
    for path, count in reads.items():
        table.note(prefix(path), count)
    return hot_runs(table.hottest(1000), min_reads)


class TestRuns:
    def test_segments_read_together_are_one_run(self) -> None:
        (run,) = runs_of({"abcd": 10})
        assert run == HotRun(name("abcd"), None, 4 * SIZE, 4 * SIZE, 10)

    def test_a_less_read_continuation_is_a_run_of_its_own(self) -> None:
        common, first, second = runs_of({"abc": 6, "abd": 5})
        assert (common.name, common.own_blocks, common.reads) == (name("ab"), 2 * SIZE, 11)
        assert (first.name, first.parent, first.num_blocks) == (name("abc"), name("ab"), 3 * SIZE)
        assert second.own_blocks == SIZE
        assert leaves([common, first, second]) == [first, second]

    def test_a_branch_in_the_middle_of_a_run(self) -> None:
        long, branch = runs_of({"abcd": 10, "ax": 3})
        assert (long.name, long.num_blocks) == (name("abcd"), 4 * SIZE)
        assert (branch.parent, branch.num_blocks, branch.own_blocks) == (long.name, 2 * SIZE, SIZE)

    def test_what_is_read_seldom_is_not_hot(self) -> None:
        assert runs_of({"a": 3}, min_reads=4) == []

    def test_leaves_tell_of_the_runs_before_them(self) -> None:
        runs = runs_of({"abc": 6, "abd": 5})
        held = held_runs(runs, {name("abc"): {A: 6, B: 5}, name("abd"): {A: 4}})
        assert held[name("ab")] == {A: 4, B: 4}
        assert held[name("abc")] == {A: 6, B: 5}
        assert held[name("abd")] == {A: 4}

    def test_a_branch_does_not_tell_of_a_run_behind_it(self) -> None:
        runs = runs_of({"abcd": 10, "ax": 3})
        held = held_runs(runs, {name("ax"): {B: 4}})
        assert held[name("abcd")] == {B: 2}


def plan(
    runs: list[HotRun],
    held: dict[BlockHash, dict[WorkerId, int]],
    *members: PoolMember,
    limits: CopyLimits = MUCH,
    ordered: frozenset[tuple[BlockHash, WorkerId]] = frozenset(),
) -> list[tuple[BlockHash, WorkerId, WorkerId, int]]:
    copies = plan_prefix_copies(runs, held, members, members, ordered, limits)
    assert all(copy.num_bytes == copy.num_blocks * BLOCK_BYTES for copy in copies)
    return [(copy.run, copy.source, copy.target, copy.num_blocks) for copy in copies]


class TestCopies:
    def test_a_hot_prefix_goes_whole_to_the_least_loaded(self) -> None:
        runs = runs_of({"abcd": 10})
        held = {name("abcd"): {A: 8, B: 3}}
        members = member(A, 80), member(B, 20), member(C, 10)
        assert plan(runs, held, *members) == [(name("abcd"), A, C, 8)]

    def test_only_what_the_target_lacks_travels(self) -> None:
        runs = runs_of({"abcd": 10})
        assert plan(runs, {name("abcd"): {A: 8, B: 3}}, member(A, 80), member(B, 0)) == [
            (name("abcd"), A, B, 5)
        ]

    def test_the_least_loaded_holder_is_read(self) -> None:
        runs = runs_of({"ab": 20})
        held = {name("ab"): {A: 4, B: 4}}
        # A holder in another role is not compared with the readers, but may be read from.
        found = plan_prefix_copies(
            runs, held, (member(A, 80), member(C, 0)), (member(A, 80), member(B, 1)), (), MUCH
        )
        assert [(copy.source, copy.target) for copy in found] == [(B, C)]

    def test_no_room_no_copy(self) -> None:
        runs = runs_of({"ab": 20})
        held = {name("ab"): {A: 4}}
        assert plan(runs, held, member(A, 80), member(B, 0, room=3)) == []
        assert plan(runs, held, member(A, 80), member(B, 0, room=3), member(C, 0)) == [
            (name("ab"), A, C, 4)
        ]

    def test_room_is_given_away_once(self) -> None:
        runs = runs_of({"ab": 20, "xy": 20})
        held = {name("ab"): {A: 4}, name("xy"): {A: 4}}
        assert len(plan(runs, held, member(A, 160), member(B, 0, room=7))) == 1

    def test_the_budget_bounds_a_plan(self) -> None:
        runs = runs_of({"ab": 20, "xy": 20})
        held = {name("ab"): {A: 4}, name("xy"): {A: 4}}
        few = CopyLimits(1.0)
        assert len(plan(runs, held, member(A, 160), member(B, 0), member(C, 0), limits=few)) == 1
        none = CopyLimits(0.0)
        assert plan(runs, held, member(A, 160), member(B, 0), limits=none) == []

    def test_what_is_on_its_way_is_not_ordered_again(self) -> None:
        runs = runs_of({"ab": 20})
        held = {name("ab"): {A: 4}}
        ordered = frozenset({(name("ab"), B)})
        assert plan(runs, held, member(A, 80), member(B, 0), ordered=ordered) == []

    def test_a_balanced_pool_is_left_alone(self) -> None:
        runs = runs_of({"ab": 20})
        assert plan(runs, {name("ab"): {A: 4}}, member(A, 80), member(B, 79)) == []

    def test_a_child_does_not_bring_the_parent_again(self) -> None:
        runs = runs_of({"abc": 30, "abd": 20})
        held = {name("ab"): {A: 4}, name("abc"): {A: 6}, name("abd"): {A: 6}}
        found = plan(runs, held, member(A, 500), member(B, 0))
        assert found[0] == (name("ab"), A, B, 4)
        assert all(each[3] == 2 for each in found[1:])

    def test_the_last_copy_of_a_leaving_worker_goes_elsewhere(self) -> None:
        runs = runs_of({"ab": 20, "xy": 10})
        held = {name("ab"): {A: 4}, name("xy"): {A: 4, B: 4}}
        members = member(A, 80, leaving=True), member(B, 40), member(C, 30)
        assert plan(runs, held, *members) == [(name("ab"), A, C, 4)]
        ordered = frozenset({(name("ab"), C)})
        assert plan(runs, held, *members, ordered=ordered) == []

    def test_a_leaving_worker_is_read_only_if_nobody_else_has_it(self) -> None:
        runs = runs_of({"ab": 20})
        held = {name("ab"): {A: 4, B: 4}}
        members = member(A, 80), member(B, 0, leaving=True), member(C, 10)
        assert plan(runs, held, *members) == [(name("ab"), A, C, 4)]

    def test_a_prefix_goes_to_its_hashed_home_whatever_the_loads(self) -> None:
        runs = runs_of(dict.fromkeys(("ab", "xy", "cd", "pq"), 20))
        held = {run.name: {A: 4} for run in runs}
        members = member(A, 10), member(B, 10), member(C, 10)
        hashed = CopyLimits(1e12, placement=PoolPlacement.HASHED)
        homes = {run.name: (A, B, C)[home(run.name, 3)] for run in runs}
        copies = plan_prefix_copies(runs, held, members, members, (), hashed)
        assert {each.run: each.target for each in copies} == {
            run: target for run, target in homes.items() if target != A
        }
        assert {each.reason for each in copies} == {CopyReason.HASHED_HOME}
        assert plan(runs, held, *members) == [], "by load alone nothing is copied"
        placed = {run: dict.fromkeys((A, target), 4) for run, target in homes.items()}
        assert plan(runs, placed, *members, limits=hashed) == []

    def test_a_leaving_worker_is_no_home(self) -> None:
        runs = runs_of(dict.fromkeys(("ab", "xy", "cd", "pq"), 20))
        members = member(A, 10), member(B, 10, leaving=True), member(C, 10)
        hashed = CopyLimits(1e12, placement=PoolPlacement.HASHED)
        held = {run.name: {A: 4} for run in runs}
        found = plan(runs, held, *members, limits=hashed)
        assert found
        assert {target for _, _, target, _ in found} == {C}

    def test_nothing_goes_to_a_leaving_worker(self) -> None:
        runs = runs_of({"ab": 20})
        members = member(A, 80, leaving=True), member(B, 0, leaving=True)
        assert plan(runs, {name("ab"): {A: 4}}, *members) == []

    @settings(max_examples=40)
    @given(
        st.dictionaries(st.text("ab", min_size=1, max_size=4), st.integers(1, 50), min_size=1),
        st.lists(
            st.tuples(st.integers(0, 500), st.integers(0, 20), st.booleans()),
            min_size=1,
            max_size=5,
        ),
        st.integers(0, 3000),
        st.randoms(use_true_random=False),
    )
    def test_every_copy_is_possible(
        self,
        reads: dict[str, float],
        workers: list[tuple[int, int, bool]],
        budget: int,
        rng: random.Random,
    ) -> None:
        runs = runs_of(reads)
        members = [
            member(WorkerId(f"w{i}"), load, room, leaving=leaving)
            for i, (load, room, leaving) in enumerate(workers)
        ]
        held = {
            run.name: {each.worker_id: rng.randrange(run.num_blocks + 1) for each in members}
            for run in runs
        }
        copies = plan_prefix_copies(runs, held, members, members, (), CopyLimits(budget))
        room = {each.worker_id: each.report.room_blocks for each in members}
        gone = {each.worker_id for each in members if each.report.leaving}
        lengths = {run.name: run.num_blocks for run in runs}
        for copy in copies:
            assert copy.source != copy.target
            assert held[copy.run][copy.source] == lengths[copy.run] > held[copy.run][copy.target]
            assert copy.target not in gone
            room[copy.target] -= copy.num_blocks
        assert all(left >= 0 for left in room.values())
        assert sum(copy.num_bytes for copy in copies[:-1]) < max(budget, 1)


class TestClusters:
    def plan(
        self,
        held: dict[BlockHash, dict[WorkerId, int]],
        *members: PoolMember,
        budget: float = 1e12,
        ordered: frozenset[tuple[BlockHash, WorkerId]] = frozenset(),
    ) -> list[tuple[WorkerId, WorkerId, int]]:
        runs = runs_of({"ab": 20, "xy": 10})
        held = {run.name: held.get(run.name, {}) for run in runs}
        copies = plan_cluster_copies(runs, held, members, ordered, budget)
        assert {copy.reason for copy in copies} <= {CopyReason.OTHER_CLUSTER}
        return [(copy.source, copy.target, copy.num_blocks) for copy in copies]

    def test_a_hot_prefix_goes_once_to_a_cluster_that_has_none(self) -> None:
        far = replace(member(B, 9), cluster="west"), replace(member(C, 5), cluster="west")
        held = {name("ab"): {A: 4, B: 1}}
        assert self.plan(held, member(A, 80), *far) == [(A, C, 4)]
        assert self.plan(held, member(A, 80), *far, budget=0) == []
        on_its_way = frozenset({(name("ab"), B)})
        assert self.plan(held, member(A, 80), *far, ordered=on_its_way) == []
        assert self.plan({name("ab"): {A: 4, B: 4}}, member(A, 80), *far) == []

    def test_the_budget_is_that_of_all_clusters(self) -> None:
        far = replace(member(B, 0), cluster="west"), replace(member(C, 0), cluster="south")
        held = {name("ab"): {A: 4}}
        assert self.plan(held, member(A, 80), *far) == [(A, C, 4), (A, B, 4)]
        assert self.plan(held, member(A, 80), *far, budget=BLOCK_BYTES) == [(A, C, 4)]

    def test_one_cluster_copies_to_no_other(self) -> None:
        assert self.plan({name("ab"): {A: 4}}, member(A, 80), member(B, 0)) == []

    def test_who_computes_no_prompts_gets_no_prefix(self) -> None:
        far = replace(member(B, 0), cluster="west")
        decodes = replace(far, report=replace(far.report, role=Role.DECODE))
        leaves = replace(far, report=replace(far.report, leaving=True))
        full = replace(far, report=replace(far.report, room_blocks=3))
        for each in (decodes, leaves, full):
            assert self.plan({name("ab"): {A: 4}}, member(A, 80), each) == []


class TestHints:
    def test_all_but_one_copy_may_go_and_leaves_go_first(self) -> None:
        runs = runs_of({"abc": 6, "abd": 5})
        held = {run.name: {A: run.num_blocks, B: run.num_blocks} for run in runs}
        hints = plan_hints(runs, held, [member(A, 0, room=50), member(B, 0, room=5)])
        assert set(hints) == {B}
        assert set(hints[B][:2]) == {name("abc"), name("abd")}
        assert hints[B][2] == name("ab")

    def test_the_last_copy_stays(self) -> None:
        runs = runs_of({"ab": 6})
        assert plan_hints(runs, {name("ab"): {A: 4}}, [member(A, 0), member(B, 0)]) == {}
        # A part of a copy, and a copy on a worker that is gone, do not count.
        held = {name("ab"): {A: 4, B: 3, C: 4}}
        assert plan_hints(runs, held, [member(A, 0), member(B, 0)]) == {}
        leaving = member(C, 0, leaving=True)
        assert plan_hints(runs, held, [member(A, 0), member(B, 0), leaving]) == {}

    def test_one_of_three_stays(self) -> None:
        runs = runs_of({"ab": 6})
        held = {name("ab"): dict.fromkeys((A, B, C), 4)}
        hints = plan_hints(runs, held, [member(each, 0) for each in (A, B, C)])
        assert len(hints) == 2


def test_unevenness_of_reads() -> None:
    assert reads_cv([]) == 0
    assert reads_cv([member(A, 0), member(B, 0)]) == 0
    assert reads_cv([member(A, 10), member(B, 10)]) == 0
    assert reads_cv([member(A, 10), member(B, 0)]) == 1
