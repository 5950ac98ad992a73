"""Copies that are read several times at once. All else is in tests/property/test_tiers.py."""

from __future__ import annotations

from kvmesh.core.types import BlockHash
from kvmesh.kv.tiers import Tier, Tiers

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


def test_a_copy_of_what_was_found_damaged_meanwhile_is_not_kept() -> None:
    lost: list[BlockHash] = []
    tiers = Tiers([Tier("host", 1), Tier("disk", 1)], lost.append)
    (first,) = tiers.begin_write(0, [KEY])
    tiers.end_write(0, first, is_good=True)
    ([load],) = tiers.begin_read([KEY]).values()
    (below,) = tiers.begin_write(1, [KEY])
    source = tiers[0].begin_read(KEY)
    tiers.end_read(0, load, is_good=False)
    assert lost == [KEY], "the loss is reported"
    tiers.end_spill(source, below, is_good=True)
    assert KEY not in tiers, "no tier reports another copy"
    tiers.check_integrity()
