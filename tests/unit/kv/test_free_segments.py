import pytest

from kvmesh.kv.free_segments import FreeSegments


def segments_of(*runs: range) -> FreeSegments:
    segments = FreeSegments()
    for run in runs:
        segments.add(run)
    segments.check_integrity()
    return segments


def test_add_merges_with_both_neighbours() -> None:
    segments = segments_of(range(2), range(4, 6))
    segments.add([3, 2])
    assert segments.segments() == [(0, 6)]
    segments.check_integrity()


def test_add_keeps_gaps() -> None:
    segments = segments_of()
    segments.add([9, 1, 2, 5])
    assert segments.segments() == [(1, 2), (5, 1), (9, 1)]
    assert (segments.num_blocks, segments.num_segments, segments.largest) == (4, 3, 2)


@pytest.mark.parametrize(
    ("n", "after", "expected"),
    [
        (2, None, [10, 11]),  # tightest that fits, not the first
        (3, None, [0, 1, 2]),  # tightest again
        (3, 19, [20, 21, 22]),  # right after the sequence's last block
        (4, 9, [20, 21, 22, 23]),  # not all of it right after the last block: one run elsewhere
        (7, 9, [10, 11, 20, 21, 22, 23, 24]),  # what is there, then the tightest for the rest
        (2, 4, [10, 11]),  # nothing after block 4
        (8, None, [20, 21, 22, 23, 24, 0, 1, 2]),  # none fits: the largest, then by fit
        (7, None, [20, 21, 22, 23, 24, 10, 11]),
        (0, None, []),
    ],
)
def test_take(n: int, after: int | None, expected: list[int]) -> None:
    segments = segments_of(range(3), range(10, 12), range(20, 25))
    assert segments.take(n, after) == expected
    segments.check_integrity()
    assert segments.num_blocks == 10 - n


@pytest.mark.parametrize(
    ("first", "count", "left"),
    [
        (20, 5, [(0, 3)]),
        (20, 1, [(0, 3), (21, 4)]),
        (24, 1, [(0, 3), (20, 4)]),
        (22, 2, [(0, 3), (20, 2), (24, 1)]),
    ],
)
def test_remove_splits(first: int, count: int, left: list[tuple[int, int]]) -> None:
    segments = segments_of(range(3), range(20, 25))
    segments.remove(first, count)
    assert segments.segments() == left
    segments.check_integrity()


@pytest.mark.parametrize(("first", "count"), [(2, 2), (3, 1), (10, 1), (24, 2)])
def test_remove_of_what_is_not_free_is_a_bug(first: int, count: int) -> None:
    with pytest.raises(AssertionError, match="not free"):
        segments_of(range(3), range(20, 25)).remove(first, count)


def test_stale_heap_entries_stay_few() -> None:
    segments = segments_of(range(1), range(10, 11), range(20, 21))
    for _ in range(200):  # the lowest one stays on top of its heap, so the others' go unseen
        segments.add([11, 21])
        segments.remove(11, 1)
        segments.remove(21, 1)
        segments.check_integrity()
    assert segments.take(1) == [0]


def test_take_all_leaves_nothing() -> None:
    segments = segments_of(range(3), range(5, 6))
    assert sorted(segments.take(4)) == [0, 1, 2, 5]
    assert (segments.num_blocks, segments.num_segments, segments.largest) == (0, 0, 0)


def test_integrity_check_notices_a_wrong_count() -> None:
    segments = segments_of(range(3))
    segments._num_blocks += 1
    with pytest.raises(AssertionError):
        segments.check_integrity()
