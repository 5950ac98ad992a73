"""What others are told of blocks: where they are, and where a prefix can be resumed."""

from __future__ import annotations

from kvmesh.core.block_names import (
    TELLS_STATES,
    TELLS_TIERS,
    in_disk,
    in_host,
    saved_state,
)
from kvmesh.core.kv_groups import PLAIN, KvGroups
from kvmesh.core.types import BlockHash
from kvmesh.kv.block_news import BlockNews
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.groups import group_key, state_key
from kvmesh.kv.tiers import Copy, Tier, Tiers

A = BlockHash(bytes(range(16)))
B = BlockHash(bytes(range(16, 32)))


def test_names_of_a_block_are_distinct_and_as_long_as_its_hash() -> None:
    names = [A, in_host(A), in_disk(A), saved_state(A), TELLS_TIERS, TELLS_STATES]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {16}
    assert in_host(A) == BlockHash(A[1:] + A[:1]), "scripts and other programs count on it"


def test_a_state_is_told_when_all_of_it_is_there() -> None:
    news = BlockNews(KvGroups((0,), state_blocks=2), 16)
    news.stored(A)
    news.stored(state_key(A, 0))
    news.stored(group_key(A, 1))
    assert news.take().stored == [TELLS_STATES, A]
    news.stored(state_key(A, 1))
    assert news.take().stored == [saved_state(A)]
    assert set(news.names([A])) == {TELLS_STATES, A, saved_state(A)}
    news.removed(state_key(A, 0))
    news.removed(group_key(A, 1))
    assert news.take().removed == [saved_state(A)]
    news.removed(state_key(A, 1))
    assert not news
    news.check_integrity([A], {})


def test_a_prefix_can_end_where_its_windows_are_whole() -> None:
    news = BlockNews(KvGroups((0, 20)), 16)  # the query after a block sees 19 positions: two blocks
    chain = [BlockHash(bytes(range(number, number + 16))) for number in range(4)]
    for parent, block in zip([None, *chain], chain, strict=False):
        news.follows(block, parent)
        news.stored(block)
        news.stored(group_key(block, 1))
    told = news.take().stored
    assert set(told) == {TELLS_STATES, *chain, *map(saved_state, chain)}
    news.removed(group_key(chain[1], 1))
    assert set(news.take().removed) == {saved_state(chain[1]), saved_state(chain[2])}
    news.follows(chain[1], chain[0])
    news.stored(group_key(chain[1], 1))
    assert set(news.take().stored) == {saved_state(chain[1]), saved_state(chain[2])}
    news.check_integrity(chain, {})


def test_a_block_is_told_to_be_in_one_place_at_a_time() -> None:
    news = BlockNews(PLAIN, 16)
    news.tells_tiers([(B, "disk")])
    assert news.take().stored == [TELLS_TIERS, B, in_disk(B)]
    news.stored(A)
    news.lowered(A, "host")
    assert news.take().stored == [A, in_host(A)]
    news.lowered(A, "disk")
    events = news.take()
    assert (events.stored, events.removed) == ([in_disk(A)], [in_host(A)])
    news.raised(A)
    news.raised(B)
    assert news.take().removed == [in_disk(A), in_disk(B)]
    news.lowered(A, "host")
    news.removed(A)
    assert news.take().removed == [A]


def test_a_pool_tells_what_lay_below_before_its_life() -> None:
    pool = BlockPool(4, 16)
    tier = Tier("disk", 3)
    tier.adopt([Copy(A, 1)])
    pool.below = Tiers([tier], pool.lost_below)
    assert pool.take_events().stored == [TELLS_TIERS, A, in_disk(A)]
    assert set(pool.told_names()) == {TELLS_TIERS, A, in_disk(A)}
    (block,) = pool.allocate(1)
    pool.seal(block, A)
    assert pool.take_events().removed == [in_disk(A)]
    pool.check_integrity()
