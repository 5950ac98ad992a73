import pytest

from kvmesh.transfer.alignment import Run, align_runs


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
