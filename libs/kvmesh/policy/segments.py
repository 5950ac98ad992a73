"""Segments, the unit of the cluster-wide KV pool: their names and the workers that they live on.

Source: TokenLake 4.3. Tests: tests/unit/policy/test_segments.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvmesh.core.types import BlockHash


def segment_hashes(block_hashes: Sequence[BlockHash], blocks: int) -> tuple[BlockHash, ...]:
    """Returns the names of the whole segments of a prefix; an incomplete last one has no name.

    A segment's name is its last block's hash, which identifies the whole prefix up to there.
    """
    return tuple(block_hashes[blocks - 1 :: blocks])


def striped_homes(
    segments: Sequence[BlockHash], num_workers: int, first: int = 0
) -> Iterator[tuple[BlockHash, int]]:
    """Yields the segments of a prefix from `first` on, each with the index of its home worker.

    A segment's home is the worker of its hash, or the next one without a segment of its row of N:
    no two segments of a row share a worker. A read of a long prefix thus loads all workers
    equally, which the hash alone leaves to chance. A home still depends only on the prefix.

    Args:
        segments: names of the prefix's segments, from the start of the prompt.
        num_workers: N, number of workers.
        first: index of the first segment to yield.
    """
    taken: set[int] = set()
    for index in range(first - first % num_workers, len(segments)):
        if index % num_workers == 0:
            taken.clear()
        worker = home(segments[index], num_workers)
        while worker in taken:
            worker = (worker + 1) % num_workers
        taken.add(worker)
        if index >= first:
            yield segments[index], worker


def home(segment: BlockHash, num_workers: int) -> int:
    """Returns the index of the worker that a normal segment lives on (TokenLake 4.3).

    The paper uses the hash modulo N, which moves nearly all segments when N changes. A consistent
    hash spreads them as evenly and moves one in N + 1 when a worker is added at the end.

    Source: Lamping and Veach, A Fast, Minimal Memory, Consistent Hash Algorithm, 2014.
    """
    assert num_workers > 0, "no worker"
    key = int.from_bytes(segment[:8], "little")
    bucket, candidate = 0, 0
    while candidate < num_workers:
        bucket = candidate
        key = (key * 2862933555777941757 + 1) & 0xFFFF_FFFF_FFFF_FFFF
        candidate = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket
