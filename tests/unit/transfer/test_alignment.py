import random

import pytest

from kvmesh.kv.runs import consecutive_runs
from kvmesh.transfer import alignment
from kvmesh.transfer.alignment import Run, align_runs, align_to_reservation, split_runs


def test_the_example_of_the_paper_takes_two_calls() -> None:
    runs = align_runs([4, 5, 6, 7], [10, 11, 12, 20])

    assert runs == [Run(4, 10, 3), Run(7, 20, 1)]


@pytest.mark.parametrize(
    ("source", "target", "num_runs"),
    [
        ([], [], 0),
        ([3], [9], 1),
        (range(100), range(50, 150), 1),
        ([1, 2, 3], [3, 2, 1], 3),
        ([5, 5, 6], [1, 2, 3], 2),
        ([1, 2, 9, 10], [4, 5, 6, 7], 2),
    ],
)
def test_number_of_runs(source: list[int], target: list[int], num_runs: int) -> None:
    assert len(align_runs(source, target)) == num_runs


def test_lists_of_unequal_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 source blocks against 1"):
        align_runs([1, 2], [1])


def test_a_fresh_request_on_both_sides_is_one_call() -> None:
    assert align_to_reservation([7, 8, 9], 0, [3]) == [Run(7, 0, 3)]


def test_borders_of_both_sides_end_runs() -> None:
    runs = align_to_reservation([4, 5, 6, 7, 20, 21], 1, [3, 2, 4])

    assert runs == [Run(4, 1, 2), Run(6, 3, 2), Run(20, 5, 2)]


def test_without_word_from_the_receiver_only_the_source_splits() -> None:
    assert align_to_reservation([4, 5, 9], 2, []) == [Run(4, 2, 2), Run(9, 4, 1)]


def test_alignment_to_lengths_equals_alignment_to_block_ids() -> None:
    rng = random.Random(2)
    for _ in range(200):
        source = _blocks(rng)
        target = _blocks(rng)[: len(source)]
        source = source[: len(target)]
        lengths = [count for _, count in consecutive_runs(target)]

        runs = align_to_reservation(source, 0, lengths)

        expected = [(run.source_start, run.count) for run in align_runs(source, target)]
        assert [(run.source_start, run.count) for run in runs] == expected
        assert [run.target_start for run in runs] == [
            sum(count for _, count in expected[:i]) for i in range(len(expected))
        ]


def test_many_blocks_are_aligned_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for _ in range(50):
        source = _blocks(rng)
        lengths = [rng.randrange(1, 9) for _ in range(rng.randrange(20))]
        first = rng.randrange(10)
        at_once = align_to_reservation(source, first, lengths)
        with monkeypatch.context() as patch:
            patch.setattr(alignment, "MANY_RUNS", len(source) + 1)
            assert align_to_reservation(source, first, lengths) == list(at_once)


def _blocks(rng: random.Random) -> list[int]:
    blocks: list[int] = []
    for start in rng.sample(range(0, 1000, 10), 6):
        blocks += range(start, start + rng.randrange(1, 10))
    return blocks


def test_groups_are_bounded_in_blocks_and_runs() -> None:
    runs = [Run(0, 10, 5), Run(9, 15, 1), Run(20, 16, 1)]

    assert split_runs(runs, max_blocks=3, max_runs=9) == [
        [Run(0, 10, 3)],
        [Run(3, 13, 2), Run(9, 15, 1)],
        [Run(20, 16, 1)],
    ]
    assert [len(group) for group in split_runs(runs, 100, max_runs=2)] == [2, 1]


@pytest.mark.parametrize("max_blocks", [1, 7, 40, 1000])
@pytest.mark.parametrize("max_runs", [1, 3, 20, 1000])
@pytest.mark.parametrize("num_runs", [12, 60])
def test_groups_hold_all_in_order_and_end_where_they_must(
    num_runs: int, max_blocks: int, max_runs: int
) -> None:
    """Few runs are tuples, many are a table: both are split alike."""
    rng, runs, index = random.Random(max_blocks * max_runs), list[Run](), 0
    for _ in range(num_runs):
        runs.append(Run(rng.randrange(1000), index, rng.randrange(1, 20)))
        index += runs[-1].count

    groups = split_runs(runs, max_blocks, max_runs)

    pairs = [
        (run.source_start + i, run.target_start + i)
        for group in groups
        for run in group
        for i in range(run.count)
    ]
    assert pairs == [(run[0] + i, run[1] + i) for run in runs for i in range(run.count)]
    sizes = [sum(run.count for run in group) for group in groups]
    assert all(size <= max_blocks for size in sizes)
    assert all(len(group) <= max_runs for group in groups)
    # A group ends only where one of the bounds is reached.
    full = [n == max_blocks or len(g) == max_runs for n, g in zip(sizes, groups, strict=True)]
    assert all(full[:-1])
