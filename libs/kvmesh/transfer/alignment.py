"""Which blocks of a sender and a receiver move in one call.

Tests: tests/unit/transfer/test_alignment.py, tests/property/test_frames_property.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks that are consecutive on both sides."""

    source_start: int
    target_start: int
    count: int


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
