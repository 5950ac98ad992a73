"""Prefixes that come up when a prompt is routed, before it is accepted."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import pytest

from kvmesh.core.types import PrefixSource, WorkerId
from kvmesh.engine.tier_stores import Good
from kvmesh.kv.hashing import chain_hashes
from kvmesh.runtime import prefetches
from kvmesh.runtime.worker import Worker
from kvmesh.runtime.worker_config import EngineSection, TiersSection, WorkerSection
from tests.waiting import until
from tests.worker_driver import (
    Driver,
    Key,
    driving,
    make_spec,
    reference_tokens,
    running_worker,
    until_idle,
)

ENGINE = EngineSection(kind="fake", max_batch_tokens=64, num_blocks=80, fake_step_s=0.01)
TIERS = TiersSection(host_gib=0.01)
DRAW = random.Random(7)
SPECS = [make_spec([DRAW.randrange(1, 1000) for _ in range(500)]) for _ in range(3)]
HASHES = chain_hashes(SPECS[0].root_hash, SPECS[0].token_ids, 16)[:31]


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running_worker(WorkerSection(id="w"), ENGINE, tiers=TIERS) as worker:
        yield worker


@pytest.fixture
async def driver(worker: Worker) -> AsyncIterator[Driver]:
    """The first prompt of `SPECS` was evicted, and is in host memory."""
    async with driving(worker) as driver:
        for number, spec in enumerate(SPECS):
            await driver.generate(worker, worker, Key(f"fill-{number}"), spec)
            await until_idle(worker)
        assert len(worker.core.pool.match(HASHES)) < len(HASHES)
        yield driver
        await until_idle(worker)


def loaded(worker: Worker) -> int:
    assert worker.tiers is not None
    return worker.tiers.statistics()[0].loaded_total


async def test_a_prefix_is_there_when_its_prompt_is_offered(worker: Worker, driver: Driver) -> None:
    driver.prefetch(worker, "again", HASHES)
    await until(lambda: len(worker.core.pool.match(HASHES)) == 31, "the prefix is up")
    await until_idle(worker)
    before, computed = loaded(worker), worker.core.token_totals[0]
    reserved = (await driver.reserve(worker, Key("again"), SPECS[0])).reserved
    answer = await driver.offer(worker, Key("again"), SPECS[0], reserved)
    assert answer.accepted.cached_tokens == 496
    first = (await driver.prefill_event(Key("again"))).first_token
    tokens = [first.token_id, *await driver._rest(Key("again"), first.finish_reason)]
    assert tokens == reference_tokens(SPECS[0])
    await until_idle(worker)
    assert loaded(worker) == before, "it came up once"
    assert worker.core.token_totals[0] - computed < 20


async def test_an_offer_waits_for_what_is_on_its_way_instead_of_reading_it_again(
    worker: Worker, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.tiers is not None
    store, asked, came = worker.tiers._stores[0], list[int](), list[Callable[[], None]]()
    load = store.load

    def slowly(places: Sequence[int], into: Sequence[int], done: Callable[[Good], None]) -> None:
        asked.append(len(places))
        load(places, into, lambda good: came.append(partial(done, good)))

    monkeypatch.setattr(store, "load", slowly)
    driver.prefetch(worker, "again", HASHES)
    await until(lambda: len(came) == 1, "the bytes are up and nobody knows")
    reserved = (await driver.reserve(worker, Key("again"), SPECS[0])).reserved
    answer = await driver.offer(worker, Key("again"), SPECS[0], reserved)
    assert answer.WhichOneof("event") == "accepted"
    came.pop()()
    first = (await driver.prefill_event(Key("again"))).first_token
    assert first.cached_tokens == 496
    tokens = [first.token_id, *await driver._rest(Key("again"), first.finish_reason)]
    assert tokens == reference_tokens(SPECS[0])
    assert len(asked) == 1
    assert worker.prefill.prefetches is not None
    assert worker.prefill.prefetches.begun_total == 1


async def test_a_prefetch_ends_when_nobody_waits_for_it(
    worker: Worker, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = worker.prefill.prefetches
    assert running is not None
    monkeypatch.setattr(running, "_step", 1)
    before = loaded(worker)
    driver.prefetch(worker, "again", HASHES)
    driver.end_prefetch(worker, "again")
    driver.prefetch(worker, "gone", HASHES)
    await driver.disconnect(worker, "prefill")
    await until(lambda: running.num_running == 0, "both have ended")
    await until_idle(worker)
    assert loaded(worker) - before < 20


async def test_no_more_come_up_at_a_time_than_help(worker: Worker, driver: Driver) -> None:
    assert worker.prefill.prefetches is not None
    for number in range(3 * prefetches.MAX_PREFETCHES):
        driver.prefetch(worker, f"r{number}", HASHES)
    driver.prefetch(worker, "empty", ())
    await until(lambda: len(worker.core.pool.match(HASHES)) == 31, "the prefix is up")
    await until_idle(worker)
    worker.core.check_integrity()


async def test_a_pool_without_room_for_the_request_itself_brings_nothing_up(
    worker: Worker, driver: Driver
) -> None:
    before, pool = loaded(worker), worker.core.pool
    taken = pool.allocate(pool.num_blocks - 61)
    driver.prefetch(worker, "again", HASHES)
    running = worker.prefill.prefetches
    assert running is not None
    await until(lambda: running.begun_total == 1 and not running.num_running, "it was looked at")
    pool.release(taken)
    assert loaded(worker) == before


async def test_a_peer_is_read_before_one_s_own_tiers(worker: Worker, driver: Driver) -> None:
    """Where the route says so; what the peer does not have comes up after all."""
    async with (
        running_worker(WorkerSection(id="peer"), ENGINE) as peer,
        driving(peer) as other,
    ):
        spec = make_spec(list(SPECS[0].token_ids[:180]))
        await other.generate(peer, peer, Key("warm"), spec)
        info, before = peer._info, loaded(worker)
        source = PrefixSource(
            info.worker_id, info.incarnation, info.control_endpoint, 11, before_load=True
        )
        held = len(worker.core.pool.match(HASHES))
        tokens, cached = await driver.generate_from(source, worker, worker, SPECS[0])
        assert tokens == reference_tokens(SPECS[0])
        assert cached == 496
        await until_idle(worker, peer)
        assert loaded(worker) - before <= 31 - max(held, 11)
        nobody = PrefixSource(WorkerId("gone"), 1, info.data_endpoint, 31, before_load=True)
        for number, each in enumerate(SPECS[1:]):
            await driver.generate(worker, worker, Key(f"evict-{number}"), each)
        tokens, cached = await driver.generate_from(nobody, worker, worker, SPECS[0])
        assert tokens == reference_tokens(SPECS[0])
        assert cached == 496
        await until_idle(worker)
