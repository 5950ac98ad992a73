import pytest

from kvmesh.transfer.frames import MAX_RUNS, BlockRun
from kvmesh.transfer.payload import split_put

BLOCK = 10


def _bytes(count: int) -> memoryview:
    return memoryview(bytes(i % 251 for i in range(count)))


@pytest.mark.parametrize("cuts", [(60,), (25, 35), (1, 0, 58, 1)])
@pytest.mark.parametrize("frame_bytes", [1, 10, 29, 30, 1000])
def test_parts_hold_all_bytes_in_order_within_the_limit(
    cuts: tuple[int, ...], frame_bytes: int
) -> None:
    data = _bytes(60)
    views, start = [], 0
    for cut in cuts:
        views.append(data[start : start + cut])
        start += cut
    runs = [BlockRun(4, 1), BlockRun(9, 5)]

    parts = split_put(runs, views, BLOCK, frame_bytes)

    assert b"".join(view for part in parts for view in part.views) == data
    indexes = [
        index
        for part in parts
        for run in part.runs
        for index in range(run.first, run.first + run.count)
    ]
    assert indexes == [4, 9, 10, 11, 12, 13]
    for part in parts:
        assert part.num_bytes == sum(view.nbytes for view in part.views)
        assert part.num_bytes == BLOCK * sum(run.count for run in part.runs)
        assert part.num_bytes <= max(BLOCK, frame_bytes)


def test_runs_of_one_frame_are_bounded() -> None:
    runs = [BlockRun(2 * i, 1) for i in range(MAX_RUNS + 1)]

    parts = split_put(runs, [_bytes(len(runs))], 1)

    assert [len(part.runs) for part in parts] == [MAX_RUNS, 1]


def test_wider_elements_are_taken_as_bytes() -> None:
    view = memoryview(bytearray(20)).cast("I")

    (part,) = split_put([BlockRun(0, 2)], [view], BLOCK)

    assert [view.nbytes for view in part.views] == [20]


def test_memory_that_does_not_match_the_runs_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="19 bytes given for 20"):
        split_put([BlockRun(0, 2)], [_bytes(19)], BLOCK)
