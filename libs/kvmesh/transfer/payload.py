"""Splits what one transfer moves into PUT frames. Pure. Tests: tests/unit/transfer/test_payload.py.

Frames are bounded so that concurrent transfers take turns and a cancelled one ends soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.transfer.frames import MAX_RUNS, BlockRun

FRAME_BYTES = 8 << 20
"""Payload of one PUT, unless one block is larger."""


@dataclass(frozen=True, slots=True)
class PutPart:
    """Runs of one PUT and the memory of their blocks, in the same order."""

    runs: tuple[BlockRun, ...]
    views: tuple[memoryview, ...]
    num_bytes: int


def split_put(
    runs: Sequence[BlockRun],
    views: Sequence[memoryview],
    block_bytes: int,
    frame_bytes: int = FRAME_BYTES,
) -> list[PutPart]:
    """Cuts a transfer at block borders; views may be cut anywhere, without copies."""
    total = sum(run.count for run in runs) * block_bytes
    given = sum(view.nbytes for view in views)
    assert 0 < total == given, f"{given} bytes given for {total} bytes of blocks"
    spans = [view.cast("B") for view in views if view.nbytes > 0]
    parts = []
    for part_runs in _group(runs, max(1, frame_bytes // block_bytes)):
        num_bytes = sum(run.count for run in part_runs) * block_bytes
        parts.append(PutPart(tuple(part_runs), _take(spans, num_bytes), num_bytes))
    return parts


def _group(runs: Iterable[BlockRun], max_blocks: int) -> list[list[BlockRun]]:
    groups: list[list[BlockRun]] = []
    room = 0
    for run in runs:
        first, left = run.first, run.count
        while left > 0:
            if room == 0 or len(groups[-1]) == MAX_RUNS:
                groups.append([])
                room = max_blocks
            count = min(left, room)
            groups[-1].append(BlockRun(first, count))
            first, left, room = first + count, left - count, room - count
    return groups


def _take(spans: list[memoryview], num_bytes: int) -> tuple[memoryview, ...]:
    """Removes the first `num_bytes` from the front of `spans`."""
    taken: list[memoryview] = []
    while num_bytes > 0:
        head = spans[0]
        taken.append(head[:num_bytes])
        rest = head[num_bytes:]
        num_bytes -= taken[-1].nbytes
        if rest.nbytes > 0:
            spans[0] = rest
        else:
            del spans[0]
    return tuple(taken)
