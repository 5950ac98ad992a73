"""Computes the runs of blocks that move from sender to receiver in one call.

Tests: tests/unit/transfer/test_alignment.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvmesh.transfer.run_table import MANY_RUNS, RunTable, as_runs, as_table, num_blocks_of


class Run(NamedTuple):
    """`count` blocks that are consecutive on both sides."""

    source_start: int
    target_start: int
    count: int  # type: ignore[assignment]


def align_runs(source: Sequence[int], target: Sequence[int]) -> list[Run]:
    """Splits two block lists, paired by position, into the fewest runs that rise by one in both.

    `source` 4 5 6 7 against `target` 10 11 12 20 gives (4, 10, 3) and (7, 20, 1). Each place where
    a list does not rise by one ends a run in every solution, so taking maximal runs is optimal.

    Raises:
        ValueError: the lists differ in length.

    Source: FlowKV, bidirectional segment alignment.
    """
    if len(source) != len(target):
        raise ValueError(f"{len(source)} source blocks against {len(target)} target blocks")
    runs: list[Run] = []
    start = 0
    for end in range(1, len(source) + 1):
        goes_on = (
            end < len(source)
            and source[end] == source[end - 1] + 1
            and target[end] == target[end - 1] + 1
        )
        if not goes_on:
            runs.append(Run(source[start], target[start], end - start))
            start = end
    return runs


def align_to_reservation(
    source: Sequence[int], first_index: int, target_lengths: Sequence[int]
) -> Sequence[Run]:
    """Returns the fewest runs from sender blocks to blocks of a reservation, named by index.

    Args:
        source: sender block ids, for indexes from `first_index` on.
        first_index: index among the blocks to write.
        target_lengths: lengths of the receiver's consecutive runs over all blocks to write; its
            block ids are not known here. If empty, only `source` splits runs.

    Returns:
        Runs whose `target_start` is an index of the reservation; a table if there are many.
    """
    if len(source) >= MANY_RUNS:
        return _aligned_table(source, first_index, target_lengths)
    borders = set(_borders(target_lengths))
    runs: list[Run] = []
    start = 0
    for end in range(1, len(source) + 1):
        if end == len(source) or source[end] != source[end - 1] + 1 or first_index + end in borders:
            runs.append(Run(source[start], first_index + start, end - start))
            start = end
    return runs


def align_chosen(
    source: Sequence[int], indexes: Sequence[int], target_lengths: Sequence[int]
) -> Sequence[Run]:
    """As `align_to_reservation`, for some indexes of it only.

    Args:
        source: sender block ids, at least one.
        indexes: among the blocks to write, ascending, one for each of them.
    """
    if indexes[-1] - indexes[0] == len(indexes) - 1:
        return align_to_reservation(source, indexes[0], target_lengths)
    blocks, places = np.array(source, np.int64), np.array(indexes, np.int64)
    borders = np.cumsum(np.array(target_lengths, np.int64))
    # Blocks on both sides of a border are in different runs of the receiver.
    spans = np.searchsorted(borders, places, side="right")
    is_start = np.concatenate(
        (
            [True],
            (np.diff(blocks) != 1) | (np.diff(places) != 1) | (np.diff(spans) != 0),
        )
    )
    starts = np.flatnonzero(is_start)
    lengths = np.diff(np.append(starts, len(blocks)))
    return as_runs(Run._make, np.column_stack((blocks[starts], places[starts], lengths)))


def _aligned_table(
    source: Sequence[int], first_index: int, target_lengths: Sequence[int]
) -> Sequence[Run]:
    """Variant of `align_to_reservation` that handles all blocks at once."""
    blocks = np.array(source, np.int64)
    is_start = np.concatenate(([True], blocks[1:] != blocks[:-1] + 1))
    borders = np.cumsum(np.array(target_lengths, np.int64)) - first_index
    is_start[borders[(borders > 0) & (borders < len(blocks))]] = True
    starts = np.flatnonzero(is_start)
    lengths = np.diff(np.append(starts, len(blocks)))
    return as_runs(Run._make, np.column_stack((blocks[starts], first_index + starts, lengths)))


def _borders(lengths: Iterable[int]) -> Iterable[int]:
    end = 0
    for length in lengths:
        end += length
        yield end


def tabled(runs: Sequence[Run]) -> Sequence[Run]:
    """Returns the same runs, as a table if there are many."""
    return as_table(Run._make, 3, runs)


def split_runs(runs: Sequence[Run], max_blocks: int, max_runs: int) -> list[Sequence[Run]]:
    """Splits runs, in order, into groups of at most `max_blocks` blocks and `max_runs` runs."""
    assert max_blocks > 0, f"groups of {max_blocks} blocks"
    assert max_runs > 0, f"groups of {max_runs} runs"
    runs = tabled(runs)
    if len(runs) <= max_runs and num_blocks_of(runs) <= max_blocks:
        return [runs] if runs else []
    if type(runs) is RunTable:
        return _split_table(runs, max_blocks, max_runs)
    return [*_split_few(runs, max_blocks, max_runs)]


def _split_few(runs: Sequence[Run], max_blocks: int, max_runs: int) -> list[list[Run]]:
    groups: list[list[Run]] = []
    room = 0
    for run in runs:
        if room > run.count and len(groups[-1]) < max_runs:
            groups[-1].append(run)
            room -= run.count
            continue
        done = 0
        while done < run.count:
            if room == 0 or len(groups[-1]) == max_runs:
                groups.append([])
                room = max_blocks
            count = min(run.count - done, room)
            groups[-1].append(Run(run.source_start + done, run.target_start + done, count))
            done, room = done + count, room - count
    return groups


def _split_table(runs: RunTable[Run], max_blocks: int, max_runs: int) -> list[Sequence[Run]]:
    """Variant of `_split_few` that handles a group at a time."""
    groups: list[Sequence[Run]] = []
    ends = np.cumsum(runs.numbers[:, 2])
    row, done = 0, 0  # `done`: blocks that are in a group already, counted from the first row
    while row < len(runs):
        end = done + max_blocks
        last = min(int(np.searchsorted(ends, end)), len(runs) - 1, row + max_runs - 1)
        group = runs.numbers[row : last + 1].copy()
        before = done - (int(ends[row]) - int(group[0, 2]))
        group[0] += (before, before, -before)
        beyond = max(0, int(ends[last]) - end)
        group[-1, 2] -= beyond
        groups.append(as_runs(Run._make, group))
        done = int(ends[last]) - beyond
        row = last if beyond else last + 1
    return groups
