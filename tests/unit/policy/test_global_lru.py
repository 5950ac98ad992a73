"""Which copies leave first where the fleet decides: those that nobody needs twice."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.pool import OldBlocks, PoolMember, PoolReport
from kvmesh.core.types import BlockHash, Endpoint, Role, WorkerId
from kvmesh.policy.global_lru import plan_evictions

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def keys(numbers: Sequence[int]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "big")) for number in numbers)


def member(
    worker: WorkerId, room: int, *tiers: tuple[str, Sequence[int]], leaving: bool = False
) -> PoolMember:
    report = PoolReport(Role.PREFILL, Endpoint(worker, 1), 1, room, 0, leaving)
    oldest = tuple(OldBlocks(tier, keys(numbers)) for tier, numbers in tiers)
    return PoolMember(worker, 1, "here", "m", report, 0.0, oldest)


def test_the_second_copy_of_a_cold_block_leaves() -> None:
    members = [member(A, 0, ("pool", (3, 2, 1))), member(B, 9)]
    held = {A: keys((1, 2, 3)), B: keys((1, 3))}
    assert plan_evictions(members, held, ()) == {A: [OldBlocks("pool", keys((3, 1)))]}


def test_what_somebody_reads_stays_on_both() -> None:
    members = [member(A, 0, ("pool", (1, 2))), member(B, 9)]
    held = {A: keys((1, 2)), B: keys((1, 2))}
    assert plan_evictions(members, held, keys((2,))) == {A: [OldBlocks("pool", keys((1,)))]}


def test_the_fuller_worker_gives_up_its_copy_and_the_other_keeps_it() -> None:
    members = [member(A, 5, ("pool", (1, 2))), member(B, 0, ("pool", (1, 2)))]
    held = {A: keys((1, 2)), B: keys((1, 2))}
    assert plan_evictions(members, held, ()) == {B: [OldBlocks("pool", keys((1, 2)))]}


def test_a_copy_on_a_leaving_worker_is_none() -> None:
    members = [member(A, 0, ("pool", (1,))), member(B, 9, leaving=True)]
    assert plan_evictions(members, {A: keys((1,)), B: keys((1,))}, ()) == {}


def test_each_tier_gives_up_its_copies() -> None:
    members = [member(A, 0, ("pool", (1,)), ("host", (1, 2))), member(B, 9)]
    held = {A: keys((1, 2)), B: keys((1, 2))}
    found = plan_evictions(members, held, ())
    assert found == {A: [OldBlocks("pool", keys((1,))), OldBlocks("host", keys((1, 2)))]}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 6))), min_size=1, max_size=4),
    st.sets(st.integers(0, 6)),
)
def test_one_copy_of_each_block_stays(workers: list[tuple[int, set[int]]], warm: set[int]) -> None:
    names = [WorkerId(f"w{number}") for number in range(len(workers))]
    held = {
        name: set(keys(sorted(numbers))) for name, (_, numbers) in zip(names, workers, strict=True)
    }
    members = [
        member(name, room, ("pool", sorted(numbers)))
        for name, (room, numbers) in zip(names, workers, strict=True)
    ]
    before = set().union(*held.values())
    for name, given_up in plan_evictions(members, held, keys(sorted(warm))).items():
        for old in given_up:
            assert held[name].issuperset(old.hashes)
            held[name].difference_update(old.hashes)
    assert set().union(*held.values()) == before
    # What is cold lies once; what is warm was not touched.
    cold = before - set(keys(sorted(warm)))
    assert all(sum(key in mine for mine in held.values()) == 1 for key in cold)
