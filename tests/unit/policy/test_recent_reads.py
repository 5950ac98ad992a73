"""Which of several holders was read less, and what routes make of it."""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from kvmesh.core.summary_statistics import coefficient_of_variation
from kvmesh.core.types import Placement, PrefixSource, RequestId, Role, RoutePlan, WorkerId
from kvmesh.policy.composition import COMPOSITIONS, decide_route
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.recent_reads import HALF_READS, RecentReads
from kvmesh.policy.view import FleetView
from tests.unit.policy.fleet_examples import LAYOUT, NOW, query, worker

A, B = WorkerId("a"), WorkerId("b")
BLOCKS, TAIL = 40, 30
TOKENS = BLOCKS * LAYOUT.block_size


def plan(name: WorkerId, cached: int, source: PrefixSource | None = None) -> RoutePlan:
    workers = (worker(name), worker("d", Role.DECODE))
    asked = query(TOKENS + TAIL, placement=Placement.DISAGGREGATED)
    made = decide_route(
        COMPOSITIONS["kvmesh"], FleetView(workers), asked, {name: cached}, NOW, OffloadState()
    ).route
    assert isinstance(made, RoutePlan)
    first = replace(made.prefill[0], source=source)
    return replace(made, prefill=(first, *made.prefill[1:]))


def test_own_blocks_and_those_of_a_source_are_read() -> None:
    reads = RecentReads()
    assert reads.of(A) == 0.0
    info = worker(B).info
    source = PrefixSource(B, info.incarnation, info.control_endpoint, 30)
    reads.note(plan(A, 10, source), LAYOUT.block_size)
    assert reads.of(A) == pytest.approx(10 * LAYOUT.block_size, rel=0.01)
    assert reads.of(B) == pytest.approx(20 * LAYOUT.block_size, rel=0.01)
    assert set(reads.among((worker(A), worker(B)), {A: 1})) == {A}


def test_old_reads_count_less_however_many_come() -> None:
    reads, one, other = RecentReads(), plan(A, 10), plan(B, 10)
    reads.note(one, LAYOUT.block_size)
    before = reads.of(A)
    for _ in range(HALF_READS):
        reads.note(other, LAYOUT.block_size)
    assert reads.of(A) == pytest.approx(before / 2)
    for _ in range(100 * HALF_READS):
        reads.note(other, LAYOUT.block_size)
    assert reads.of(A) == pytest.approx(0.0, abs=1e-9)
    assert reads.of(B) == pytest.approx(10 * LAYOUT.block_size * HALF_READS / 0.6931, rel=0.01)


def read_evenly(holders: dict[int, list[str]], *, told: bool) -> float:
    """The CV of reads of an idle fleet whose prefixes are as popular as Zipf's law says."""
    workers = (*(worker(name) for name in "abcd"), worker("z", Role.DECODE))
    shares = list(itertools.accumulate((rank + 1) ** -2.0 for rank in range(12)))
    draw, reads, taken = random.Random(3), RecentReads(), Counter(dict.fromkeys("abcd", 0))
    for number in range(160):
        prefix = bisect.bisect(shares, draw.random() * shares[-1])
        matches = {WorkerId(name): BLOCKS for name in holders[prefix]}
        known = reads.among(workers, matches) if told else {}
        asked = query(
            TOKENS + TAIL, request_id=RequestId(f"r{number}"), placement=Placement.DISAGGREGATED
        )
        view = FleetView(workers, reads=known)
        made = decide_route(COMPOSITIONS["kvmesh"], view, asked, matches, NOW, OffloadState()).route
        assert isinstance(made, RoutePlan)
        reads.note(made, LAYOUT.block_size)
        taken[made.prefill[0].worker_id] += 1
    return coefficient_of_variation([float(each) for each in taken.values()])


def test_copies_are_read_so_that_all_workers_are_read_alike() -> None:
    """The most popular prefix is everywhere; of each other one there is one copy."""
    holders = {prefix: ["abcd"[prefix % 4]] for prefix in range(12)}
    holders[0] = list("abcd")
    assert read_evenly(holders, told=True) < 0.05
    assert read_evenly(holders, told=False) > 0.15, "chance does not even out what one alone holds"


def test_a_views_reads_are_those_that_each_worker_is_known_for() -> None:
    reads = RecentReads()
    for _ in range(2 * HALF_READS):
        reads.note(plan(A, 10), LAYOUT.block_size)
        reads.note(plan(B, 20), LAYOUT.block_size)
    found = reads.among((worker(A), worker(B), worker("c")), {A: 1, B: 1, WorkerId("c"): 1})
    assert found == {A: reads.of(A), B: reads.of(B)}
    assert found[B] == pytest.approx(2 * found[A], rel=0.01)


def test_a_worker_that_nothing_was_read_of_is_not_known() -> None:
    reads = RecentReads()
    reads.note(plan(A, 0), LAYOUT.block_size)
    assert reads.among((worker(A),), {A: 1}) == {}
