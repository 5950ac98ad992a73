from __future__ import annotations

from kvmesh.core.types import WorkerId
from kvmesh.kv.block_pool import BlockPool
from kvmesh.sim.prefix_index import PrefixIndex
from kvmesh.sim.requests import block_hash

A, B = WorkerId("a"), WorkerId("b")
HASHES = [block_hash(each) for each in range(6)]


def fill(pool: BlockPool, *ids: int) -> list[int]:
    blocks = pool.allocate(len(ids))
    for block, each in zip(blocks, ids, strict=True):
        pool.seal(block, HASHES[each])
    return blocks


def test_leading_blocks_by_worker() -> None:
    index, pools = PrefixIndex(), {A: BlockPool(4, 512), B: BlockPool(4, 512)}
    for name, pool in pools.items():
        index.add(name, pool)
        index.note_change(name)
    fill(pools[A], 0, 1, 2)
    fill(pools[B], 0, 2)
    assert index.match(HASHES[:4]) == {A: 3, B: 1}
    assert index.match(HASHES[:1]) == {A: 1, B: 1}
    assert index.match(HASHES[1:2]) == {A: 1}
    assert index.match(HASHES[4:]) == {}
    assert index.match([]) == {}


def test_evicted_blocks_are_forgotten() -> None:
    index, pool = PrefixIndex(), BlockPool(4, 512)
    index.add(A, pool)
    pool.release(fill(pool, 0, 1, 2))
    index.note_change(A)
    assert index.match(HASHES) == {A: 3}
    pool.allocate(2)
    assert index.match(HASHES) == {A: 3}, "nobody said that there were changes"
    index.note_change(A)
    assert index.match(HASHES) == {A: 2}


def test_a_dead_worker_holds_nothing() -> None:
    index, pool = PrefixIndex(), BlockPool(4, 512)
    index.add(A, pool)
    fill(pool, 0)
    index.note_change(A)
    index.remove(A)
    assert index.match(HASHES) == {}


def test_a_worker_that_comes_late_moves_no_blocks_of_others() -> None:
    index, late = PrefixIndex(), WorkerId("aa")
    pools = {name: BlockPool(4, 512) for name in (A, B, late)}
    for name in (A, B):
        index.add(name, pools[name])
        fill(pools[name], 0)
        index.note_change(name)
    assert index.match(HASHES[:1]) == {A: 1, B: 1}
    index.add(late, pools[late])
    fill(pools[late], 1)
    index.note_change(late)
    assert index.match(HASHES[:1]) == {A: 1, B: 1}
    assert index.match(HASHES[1:2]) == {late: 1}
