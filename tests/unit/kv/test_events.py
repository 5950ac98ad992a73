from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.core.types import BlockHash
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.events import AllCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventLog
from kvmesh.kv.hashing import chain_hashes, root_hash

ROOT = root_hash("m")


def always(_block_hash: BlockHash) -> bool:
    return True


def log_of(is_cached: Callable[[BlockHash], bool] = always) -> KvEventLog:
    log = KvEventLog(2, is_cached)
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
        BlocksStored((first,), None, (1, 2)),
        BlocksStored((second, third), first, (3, 4, 5, 6)),
    ]
    assert log.take() == []


def test_what_is_held_is_not_told_again() -> None:
    log, tokens = log_of(), [1, 2, 3, 4, 5, 6]
    hashes = hashes_of(tokens)
    log.stored(hashes[:2], tokens, 1)
    log.stored(hashes, tokens, 0)
    events = log.take()
    assert events == [
        BlocksStored((hashes[1],), hashes[0], (3, 4)),
        BlocksStored((hashes[0],), None, (1, 2)),
        BlocksStored((hashes[2],), hashes[1], (5, 6)),
    ]


def test_what_is_not_kept_is_not_told() -> None:
    tokens = [1, 2, 3, 4]
    first, second = hashes_of(tokens)
    log = log_of(lambda block_hash: block_hash != first)
    log.stored([first, second], tokens, 0)
    assert log.take() == [BlocksStored((second,), first, (3, 4))]
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
        BlocksRemoved((second, first)),
        BlocksStored((first,), None, (1, 2)),
    ]


def replayed(events: list[KvEvent]) -> set[BlockHash]:
    held: set[BlockHash] = set()
    for event in events:
        match event:
            case BlocksStored(hashes):
                assert not held & set(hashes), "stored twice"
                held |= set(hashes)
            case BlocksRemoved(hashes):
                assert set(hashes) <= held, "removed and never stored"
                held -= set(hashes)
            case AllCleared():
                held.clear()
    return held


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), max_size=25))
def test_a_reader_knows_what_the_pool_holds(prompts: list[list[int]]) -> None:
    pool = BlockPool(6, 2)
    log = KvEventLog(2, lambda block_hash: bool(pool.match((block_hash,))))
    pool.on_removed = log.removed
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
        events += log.take()
        assert replayed(events) == set(pool.held_hashes())
