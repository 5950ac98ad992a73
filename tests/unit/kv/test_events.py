from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventLog
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.kv.tiers import Tier, Tiers
from kvmesh.runtime.kv_events import MEDIA, log_of_pool

ROOT = root_hash("m")


def always(_block_hash: BlockHash) -> bool:
    return True


def log_of(is_cached: Callable[[BlockHash], bool] = always) -> KvEventLog:
    log = KvEventLog(2, is_cached, "GPU")
    assert log.take() == [AllCleared()]
    return log


def hashes_of(tokens: list[int]) -> list[BlockHash]:
    return chain_hashes(ROOT, tokens, 2)


def test_blocks_come_with_their_parent_and_tokens() -> None:
    log, tokens = log_of(), [1, 2, 3, 4, 5, 6, 7]
    first, second, third = hashes_of(tokens)
    log.stored([first], tokens, 0)
    log.stored([first, second, third], tokens, 1)
    assert log.take() == [
        BlocksStored((first,), None, (1, 2), "GPU"),
        BlocksStored((second, third), first, (3, 4, 5, 6), "GPU"),
    ]
    assert log.take() == []


def test_what_is_held_is_not_told_again() -> None:
    log, tokens = log_of(), [1, 2, 3, 4, 5, 6]
    hashes = hashes_of(tokens)
    log.stored(hashes[:2], tokens, 1)
    log.stored(hashes, tokens, 0)
    events = log.take()
    assert events == [
        BlocksStored((hashes[1],), hashes[0], (3, 4), "GPU"),
        BlocksStored((hashes[0],), None, (1, 2), "GPU"),
        BlocksStored((hashes[2],), hashes[1], (5, 6), "GPU"),
    ]


def test_what_is_not_kept_is_not_told() -> None:
    tokens = [1, 2, 3, 4]
    first, second = hashes_of(tokens)
    log = log_of(lambda block_hash: block_hash != first)
    log.stored([first, second], tokens, 0)
    assert log.take() == [BlocksStored((second,), first, (3, 4), "GPU")]
    log.removed(first)
    assert log.take() == []


def test_removals_keep_their_place() -> None:
    log, tokens = log_of(), [1, 2, 3, 4]
    first, second = hashes_of(tokens)
    log.stored([first, second], tokens, 0)
    log.removed(second)
    log.removed(first)
    log.stored([first], tokens, 0)
    assert len(log) == 3
    assert log.take()[1:] == [
        BlocksRemoved((second, first), "GPU"),
        BlocksStored((first,), None, (1, 2), "GPU"),
    ]


def test_a_block_is_in_one_medium_at_a_time() -> None:
    log, tokens = log_of(), [1, 2, 3, 4, 5, 6]
    first, second, third = hashes_of(tokens)
    log.found([third], "DISK")
    log.stored([first, second], tokens, 0)
    log.lowered(first, "CPU")
    log.lowered(second, "CPU")
    log.lowered(second, "DISK")
    log.stored([first], tokens, 0)
    log.removed(second)
    assert log.take() == [
        BlocksStored((third,), None, (), "DISK"),
        BlocksStored((first, second), None, (1, 2, 3, 4), "GPU"),
        BlocksStored((first, second), None, (), "CPU"),
        BlocksRemoved((first, second), "GPU"),
        BlocksStored((second,), None, (), "DISK"),
        BlocksRemoved((second,), "CPU"),
        BlocksStored((first,), None, (1, 2), "GPU"),
        BlocksRemoved((first,), "CPU"),
        BlocksRemoved((second,), "DISK"),
    ]


def test_pool_and_tier_of_one_medium_are_one_to_others() -> None:
    log, tokens = log_of(), [1, 2]
    (only,) = hashes_of(tokens)
    log.stored([only], tokens, 0)
    log.lowered(only, "GPU")
    log.stored([only], tokens, 0)
    assert len(log.take()) == 1


def replayed(events: list[KvEvent]) -> dict[BlockHash, str]:
    """The medium of each block."""
    held: dict[BlockHash, list[str]] = {}
    for event in events:
        match event:
            case BlocksStored(hashes, _, _, medium):
                for each in hashes:
                    held.setdefault(each, []).append(medium)
            case BlocksRemoved(hashes, medium):
                for each in hashes:
                    held[each].remove(medium)
            case AllCleared():
                held.clear()
    assert all(len(media) <= 1 for media in held.values()), "in one medium at a time"
    return {each: media[0] for each, media in held.items() if media}


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), max_size=25),
    st.lists(st.integers(1, 9), max_size=2),
)
def test_a_reader_knows_what_pool_and_tiers_hold(
    prompts: list[list[int]], places: list[int]
) -> None:
    pool = BlockPool(6, 2)
    tiers = Tiers(
        [Tier(name, size) for name, size in zip(("host", "disk"), places, strict=False)]
        or [Tier("host", 1)],
        pool.lost_below,
    )
    if places:
        pool.below = tiers
    log = log_of_pool(pool, "GPU")
    events: list[KvEvent] = []
    for tokens in prompts:
        hashes = hashes_of(tokens)
        cached = pool.match(hashes)
        pool.acquire(cached)
        fresh = pool.allocate(len(hashes) - len(cached))
        for block, block_hash in zip(fresh, hashes[len(cached) :], strict=True):
            pool.seal(block, block_hash)
        log.stored(hashes, tokens, len(cached))
        pool.release(cached + fresh)
        copy_down(pool, tiers)
        events += log.take()
        assert replayed(events) == {
            each: "GPU" if pool.find(each) is not None else MEDIA[tiers.tier_of(each) or ""]
            for each in pool.held_hashes()
        }


def copy_down(pool: BlockPool, tiers: Tiers) -> None:
    """All that is in the pool to the first tier, all of that to the next."""
    unsaved = pool.unsaved(pool.num_blocks)
    pool.saving(unsaved)
    for copy in tiers.begin_write(0, [each.key for each in unsaved]):
        tiers.end_write(0, copy, is_good=True)
    if len(tiers) > 1:
        for copy in tiers.begin_write(1, tiers[0].unsaved(pool.num_blocks)):
            tiers.end_write(1, copy, is_good=True)
