from __future__ import annotations

import random

import pytest

from kvmesh.policy.pool_plan import PoolPlacement
from kvmesh.sim.pool import PoolSettings, run_pool
from kvmesh.sim.trace_request import TRACE_BLOCK, TraceRequest


def skewed(own_blocks: int, num: int = 6000, rate: float = 20.0) -> list[TraceRequest]:
    """Prompts of a system prompt, one of forty prefixes by Zipf (six blocks), and own text."""
    rng = random.Random(1)
    weights = [1 / rank for rank in range(1, 41)]
    requests = []
    for index in range(num):
        which = rng.choices(range(40), weights)[0]
        prefix = [1, 2, *range(100 + 10 * which, 104 + 10 * which)]
        own = range(10**6 + 10 * index, 10**6 + 10 * index + own_blocks)
        ids = (*prefix, *own)
        requests.append(TraceRequest(index / rate, len(ids) * TRACE_BLOCK, 1, ids))
    return requests


REQUESTS = skewed(own_blocks=6)


def test_replication_keeps_reads_even() -> None:
    """TokenLake 7.2: 11 % on average and below 15 %, against 99 % behind a router."""
    even = run_pool(REQUESTS, PoolSettings(8, 400), seed=0)
    assert even.mean_cv < 0.15
    assert even.copies_made > 0
    single = run_pool(REQUESTS, PoolSettings(8, 400, replicate=False), seed=0)
    assert single.mean_cv > 0.5
    assert single.most_copies == 1
    assert even.hit_rate == pytest.approx(single.hit_rate, abs=0.02)


def test_caches_of_their_own_hold_the_same_prefix_many_times() -> None:
    pooled = run_pool(REQUESTS, PoolSettings(8, 12), seed=0)
    apart = run_pool(REQUESTS, PoolSettings(8, 12, replicate=False, pooled=False), seed=0)
    assert pooled.hit_rate > 1.5 * apart.hit_rate


def test_a_router_that_follows_prefixes_loads_unevenly() -> None:
    sticky = skewed(own_blocks=2)
    pooled = run_pool(sticky, PoolSettings(8, 400), seed=0)
    apart = run_pool(sticky, PoolSettings(8, 400, replicate=False, pooled=False), seed=0)
    assert pooled.cvs[-1] < 0.15, "when the copies are made"
    assert apart.cvs[-1] > 2.5 * pooled.cvs[-1]


def test_copies_of_whole_prefixes_even_out_reads_of_own_caches() -> None:
    sticky = skewed(own_blocks=2)
    apart = run_pool(sticky, PoolSettings(8, 400, replicate=False, pooled=False), seed=0)
    copied = run_pool(sticky, PoolSettings(8, 400, pooled=False), seed=0)
    assert apart.copies_made == 0 < copied.copies_made
    assert copied.mean_cv < 0.75 * apart.mean_cv
    assert copied.hit_rate > apart.hit_rate - 0.02


@pytest.mark.parametrize(("capacity", "wins"), [(400, True), (60, False)])
def test_hashed_homes_even_out_reads_where_caches_have_room(capacity: int, wins: bool) -> None:
    sticky = skewed(own_blocks=2)
    local = run_pool(sticky, PoolSettings(8, capacity, pooled=False), seed=0)
    hashed = run_pool(
        sticky, PoolSettings(8, capacity, pooled=False, placement=PoolPlacement.HASHED), seed=0
    )
    assert hashed.copies_made > local.copies_made
    assert (hashed.mean_cv < local.mean_cv) is wins


def test_a_prompt_larger_than_any_cache_is_held_by_all_together() -> None:
    ids = tuple(range(1, 65))
    twice = [TraceRequest(float(at), 64 * TRACE_BLOCK, 1, ids) for at in range(2)]
    assert run_pool(twice, PoolSettings(8, 12), seed=0).hit_rate == 0.5
    assert (
        run_pool(twice, PoolSettings(8, 12, replicate=False, pooled=False), seed=0).hit_rate < 0.25
    )


def test_an_endless_pool_finds_all_that_was_seen() -> None:
    found = run_pool(REQUESTS, PoolSettings(4, 10**6, replicate=False), seed=0)
    seen: set[int] = set()
    hits = 0
    for request in REQUESTS:
        # Segments of two blocks are named by their last one.
        for name in request.hash_ids[1::2]:
            hits += name in seen
            seen.add(name)
    assert found.hits == hits
    assert found.segments == 6 * len(REQUESTS)


def test_equal_seeds_are_equal() -> None:
    small = REQUESTS[:800]
    assert run_pool(small, PoolSettings(8, 20), 3) == run_pool(small, PoolSettings(8, 20), 3)
