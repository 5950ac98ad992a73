"""Runs of consecutive block ids: each is one range of bytes. Tests: tests/unit/kv/test_runs.py."""

from __future__ import annotations

from collections.abc import Sequence


def consecutive_runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the fewest `(first block, count)` runs that list `blocks` in order."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
