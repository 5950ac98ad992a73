"""SlotIndex: lookups by halving against looking at every block, and which lives count."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.block_names import (
    TELLS_STATES,
    TELLS_TIERS,
    in_disk,
    in_host,
    saved_state,
)
from kvmesh.core.slots import Publisher, Slot, SlotChange, SlotState
from kvmesh.core.types import BlockHash, WorkerId
from kvmesh.policy.holders import Lower
from kvmesh.policy.slot_index import SlotIndex

SPACE = "model"
A = WorkerId("a")


def block(number: int) -> BlockHash:
    return BlockHash(hashlib.blake2b(str(number).encode(), digest_size=16).digest())


def opened(index: SlotIndex, name: str, held: list[int], incarnation: int = 1) -> Slot:
    """A live slot of a worker whose life counts."""
    slot = Slot(f"{name}-{incarnation}")
    whose = Publisher(WorkerId(name), incarnation, "east", SPACE)
    stored = b"".join(map(block, held))
    index.apply(SlotChange(slot, whose, SlotState.LIVE, stored))
    index.note_life(whose.worker_id, incarnation)
    return slot


def told(index: SlotIndex, slot: Slot, *names: BlockHash) -> None:
    index.apply(SlotChange(slot, stored=b"".join(names)))


def run_of(held: set[int], length: int) -> int:
    """Leading numbers of 0..length-1 that are held."""
    return next((number for number in range(length) if number not in held), length)


lengths = st.lists(st.integers(0, 70), max_size=12)


@given(lengths, st.integers(1, 64))
def test_whoever_holds_whole_prefixes_is_found_with_their_length(
    held: list[int], length: int
) -> None:
    index = SlotIndex()
    for number, each in enumerate(held):
        opened(index, f"w{number}", list(range(each)))
    asked = [block(number) for number in range(length)]
    expected = {f"w{number}": min(each, length) for number, each in enumerate(held) if each}
    assert dict(index.match(SPACE, asked)) == expected


@given(st.lists(st.sets(st.integers(0, 20)), max_size=5), st.integers(1, 20))
def test_a_hole_is_never_more_than_overlooked(held: list[set[int]], length: int) -> None:
    index = SlotIndex()
    for number, each in enumerate(held):
        opened(index, f"w{number}", sorted(each))
    found = index.match(SPACE, [block(number) for number in range(length)])
    for number, each in enumerate(held):
        blocks = found.get(WorkerId(f"w{number}"), 0)
        assert blocks >= run_of(each, length)
        assert not blocks or {0, blocks - 1} <= each, "both ends were looked at"


def test_a_lookup_looks_at_few_blocks_of_a_long_chain() -> None:
    index = SlotIndex()
    for number, length in enumerate((1900, 1900, 700, 3)):
        opened(index, f"w{number}", list(range(length)))
    looked: list[int] = []

    class Chain(list[BlockHash]):
        def __getitem__(self, at: object) -> BlockHash:  # type: ignore[override]
            assert isinstance(at, int)
            looked.append(at)
            return super().__getitem__(at)

    found = index.match(SPACE, Chain(map(block, range(1900))))
    assert dict(found) == {"w0": 1900, "w1": 1900, "w2": 700, "w3": 3}
    assert len(looked) < 30


def test_only_the_life_that_counts_is_found() -> None:
    index = SlotIndex()
    opened(index, "a", [0, 1])
    assert dict(index.match(SPACE, [block(0)])) == {"a": 1}
    index.note_life(A, 2)
    assert not index.match(SPACE, [block(0)])
    opened(index, "a", [0], incarnation=2)
    assert dict(index.match(SPACE, [block(0), block(1)])) == {"a": 1}
    index.note_life(A, None)
    assert not index.match(SPACE, [block(0)])


def test_a_snapshot_replaces_what_was_there_at_its_end() -> None:
    index = SlotIndex()
    before = opened(index, "a", [0, 1, 2])
    loading = Slot("later")
    whose = Publisher(A, 1, "east", SPACE)
    index.apply(SlotChange(loading, whose, SlotState.LOADING, block(0)))
    assert dict(index.match(SPACE, [block(0), block(1)])) == {"a": 2}
    index.apply(SlotChange(loading, state=SlotState.LIVE))
    assert dict(index.match(SPACE, [block(0), block(1)])) == {"a": 1}
    index.apply(SlotChange(before, state=SlotState.ENDED))
    index.apply(SlotChange(before, stored=block(1)))
    assert dict(index.match(SPACE, [block(0), block(1)])) == {"a": 1}


def test_places_of_swept_slots_are_used_again_and_nothing_is_left() -> None:
    index = SlotIndex()
    for number in range(50):
        slot = opened(index, "a", [0, number], incarnation=number + 1)
        index.apply(SlotChange(slot, state=SlotState.ENDED))
        while index.needs_sweep:
            index.sweep(1)
        assert index.num_blocks == 0
    opened(index, "b", [0])
    assert dict(index.match(SPACE, [block(0)])) == {"b": 1}
    assert index.held(SPACE, WorkerId("b")) == {block(0)}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    st.integers(1, 30),
)
def test_a_match_says_in_which_tiers_its_blocks_are(
    workers: list[tuple[int, int, int]], length: int
) -> None:
    """Each worker holds the beginning in its pool, then blocks in host memory, then on disk."""
    index = SlotIndex()
    names = [WorkerId(f"w{number}") for number in range(len(workers))]
    for name, (pool, host, disk) in zip(names, workers, strict=True):
        slot = opened(index, name, list(range(pool + host + disk)))
        told(index, slot, TELLS_TIERS)
        told(index, slot, *(in_host(block(each)) for each in range(pool, pool + host)))
        told(index, slot, *(in_disk(block(pool + host + each)) for each in range(disk)))
    found = index.match(SPACE, [block(number) for number in range(length)])
    expected = []
    for pool, host, disk in workers:
        held, in_memory = min(length, pool + host + disk), min(length, pool + host)
        expected.append(Lower(in_memory - min(length, pool), held - in_memory))
    assert found.lower(names) == (expected if found else None)


def test_a_fleet_without_tiers_pays_for_no_further_look() -> None:
    index = SlotIndex()
    opened(index, "a", list(range(5)))
    assert index.match(SPACE, [block(number) for number in range(9)]).lower([A]) is None


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sets(st.integers(1, 12)), st.booleans()), max_size=5),
    st.integers(1, 12),
)
def test_a_match_ends_where_a_state_is_saved(
    workers: list[tuple[int, set[int], bool]], length: int
) -> None:
    index = SlotIndex()
    expected = {}
    for number, (held, states, tells) in enumerate(workers):
        name, kept = f"w{number}", {end for end in states if end <= held}
        slot = opened(index, name, list(range(held)))
        if tells:
            told(index, slot, TELLS_STATES, *(saved_state(block(end - 1)) for end in kept))
        longest = min(held, length)
        if tells:
            longest = max((end for end in kept if end <= longest), default=0)
        if longest:
            expected[name] = longest
    found = index.match(SPACE, [block(number) for number in range(length)])
    assert dict(found) == expected
    assert [blocks for blocks, _ in found.longest(9)] == sorted(expected.values(), reverse=True)
