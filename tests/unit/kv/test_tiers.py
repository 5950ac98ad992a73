"""Copies that are read several times at once. All else is in tests/property/test_tiers.py."""

from __future__ import annotations

from kvmesh.core.types import BlockHash
from kvmesh.kv.tiers import Tier

KEY, OTHER = BlockHash(b"k" * 16), BlockHash(b"o" * 16)


def test_a_lost_copy_keeps_its_place_until_its_last_reader_has_left() -> None:
    tier = Tier("host", 1)
    ([copy], _) = tier.begin_write([KEY])
    tier.end_write(copy, is_good=True, is_saved=True)
    reads = [tier.begin_read(KEY) for _ in range(3)]
    assert tier.end_read(reads[0], is_good=False), "the copy is dropped"
    assert KEY not in tier
    for read in reads[1:]:
        tier.check_integrity()
        assert tier.begin_write([OTHER]) == ([], []), "its place is still read"
        assert not tier.end_read(read, is_good=False), "it was dropped before"
    tier.check_integrity()
    assert tier.statistics().lost_total == 1
    ([there], _) = tier.begin_write([OTHER])
    assert there.place == copy.place
