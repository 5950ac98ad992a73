from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.types import BlockHash
from kvmesh.policy.segments import (
    home,
    segment_hashes,
    striped_homes,
)


def names(count: int) -> list[BlockHash]:
    return [BlockHash(blake2b(str(i).encode(), digest_size=16).digest()) for i in range(count)]


def test_a_segment_is_named_by_its_last_block() -> None:
    hashes = names(7)
    assert segment_hashes(hashes, 3) == (hashes[2], hashes[5])
    assert segment_hashes(hashes[:2], 3) == ()
    assert segment_hashes(hashes, 1) == tuple(hashes)


def test_homes_are_spread_evenly() -> None:
    counts = Counter(home(name, 8) for name in names(8000))
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.15 * 1000


def test_one_more_worker_moves_one_share() -> None:
    moved = [(home(name, 8), home(name, 9)) for name in names(9000)]
    changed = [after for before, after in moved if before != after]
    assert set(changed) == {8}, "segments move to the new worker only"
    assert 800 < len(changed) < 1200


@given(st.integers(1, 12), st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=60))
def test_segments_in_a_row_live_apart(num_workers: int, names: list[bytes]) -> None:
    segments = [BlockHash(name) for name in names]
    homes = dict(enumerate(index for _, index in striped_homes(segments, num_workers)))
    for begin in range(0, len(segments), num_workers):
        row = [homes[n] for n in range(begin, min(begin + num_workers, len(segments)))]
        assert len(set(row)) == len(row)
        assert row[0] == home(segments[begin], num_workers)
    # A longer prefix leaves the homes of the shorter one, whoever stores the rest.
    half = len(segments) // 2
    assert [index for _, index in striped_homes(segments, num_workers, half)] == [
        homes[n] for n in range(half, len(segments))
    ]
