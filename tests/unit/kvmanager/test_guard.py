"""StoreGuard and PrefixLookups: nobody waits for a store that is down or slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from prometheus_client import REGISTRY

from kvmesh.core.clock import ManualClock
from kvmesh.core.slots import PrefixMatch, Publisher
from kvmesh.core.types import WorkerId
from kvmesh.metadata.memory_store import MemoryMetadataStore
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.v1 import kv_manager_service_pb2 as pb
from services.kvmanager.config import LimitConfig
from services.kvmanager.guard import StoreGuard
from services.kvmanager.lookup import PrefixLookups
from tests.waiting import until

HASH = bytes(16)


class FaultyStore(MemoryMetadataStore):
    """Fails or hangs when told to; counts what reaches it."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), 10.0)
        self.fails = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_matches = self.num_probes = 0

    async def match(self, namespace: str, hashes: bytes) -> list[PrefixMatch]:
        self.num_matches += 1
        await self.gate.wait()
        if self.fails:
            raise StoreUnavailableError("told to")
        return await super().match(namespace, hashes)

    async def probe(self) -> None:
        self.num_probes += 1
        if self.fails:
            raise StoreUnavailableError("told to")


class Recoveries:
    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> None:
        self.count += 1


@contextlib.asynccontextmanager
async def probing(guard: StoreGuard) -> AsyncIterator[None]:
    task = asyncio.ensure_future(guard.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_one_failure_keeps_callers_away_until_a_probe_succeeds() -> None:
    store, recoveries = FaultyStore(), Recoveries()
    guard = StoreGuard(store, 0.001, recoveries)
    await guard.start()
    assert guard.up
    store.fails = True
    for _ in range(5):
        with pytest.raises(StoreUnavailableError):
            await guard.call(lambda s: s.match("n", HASH))
    assert store.num_matches == 1
    async with probing(guard):
        assert not guard.up
        store.fails = False
        await until(lambda: guard.up)
        assert await guard.call(lambda s: s.match("n", HASH)) == []
        assert recoveries.count == 1


async def test_probes_go_on_until_one_succeeds_and_not_after() -> None:
    store, recoveries = FaultyStore(), Recoveries()
    store.fails = True
    guard = StoreGuard(store, 0.001, recoveries)
    await guard.start()
    assert not guard.up
    async with probing(guard):
        await until(lambda: store.num_probes >= 4)
        assert not guard.up
        assert recoveries.count == 0
        store.fails = False
        await until(lambda: guard.up)
        probes = store.num_probes
        assert await guard.call(lambda s: s.match("n", HASH)) == []
        assert store.num_probes == probes


async def test_how_it_stands_is_told_by_the_gauge_and_once_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FaultyStore()
    guard = StoreGuard(store, 0.001, Recoveries())
    await guard.start()
    assert REGISTRY.get_sample_value("kvmesh_kvmanager_redis_up") == 1
    store.fails = True
    calls = [guard.call(lambda s: s.match("n", HASH)) for _ in range(3)]
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in failures} == {StoreUnavailableError}
    assert REGISTRY.get_sample_value("kvmesh_kvmanager_redis_up") == 0
    assert caplog.text.count("store_down") == 1
    store.fails = False
    async with probing(guard):
        await until(lambda: guard.up)
    assert REGISTRY.get_sample_value("kvmesh_kvmanager_redis_up") == 1


async def test_start_without_a_store() -> None:
    store = FaultyStore()
    store.fails = True
    guard = StoreGuard(store, 0.001, Recoveries())
    await guard.start()
    assert not guard.up


async def test_failure_during_recovery_is_followed_by_another_recovery() -> None:
    store = FaultyStore()
    outcomes: list[bool] = []

    async def recover() -> None:
        try:
            await guard.call(lambda s: s.match("n", HASH))
        except StoreUnavailableError:
            outcomes.append(False)
        else:
            outcomes.append(True)

    class Flapping(FaultyStore):
        async def match(self, namespace: str, hashes: bytes) -> list[PrefixMatch]:
            if not outcomes:
                raise StoreUnavailableError("still loading")
            return []

    store = Flapping()
    store.fails = True
    guard = StoreGuard(store, 0.001, recover)
    await guard.start()
    store.fails = False
    async with probing(guard):
        await until(lambda: len(outcomes) == 2)
    assert outcomes == [False, True]


async def test_lookup_that_takes_too_long_is_degraded_and_trips_the_guard() -> None:
    store = FaultyStore()
    guard = StoreGuard(store, 0.001, Recoveries())
    lookups = PrefixLookups(guard, LimitConfig(lookup_timeout_s=0.01), lambda *_: None)
    store.gate.clear()
    answer = await lookups.answer(pb.MatchPrefixRequest(correlation_id=4, namespace="n"))
    assert (answer.correlation_id, answer.degraded) == (4, True)
    assert not guard.up


async def test_lookups_beyond_the_limit_are_degraded_and_do_not_wait() -> None:
    store = FaultyStore()
    slot = (await store.register(Publisher(WorkerId("w"), 1, "east", "n"))).slot
    await store.apply_events(slot, 1, HASH, b"")
    guard = StoreGuard(store, 0.001, Recoveries())
    lookups = PrefixLookups(
        guard, LimitConfig(lookup_timeout_s=10.0, max_lookups=2), lambda *_: None
    )
    question = pb.MatchPrefixRequest(correlation_id=1, namespace="n", block_hashes=HASH)
    store.gate.clear()
    waiting = [asyncio.ensure_future(lookups.answer(question)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await lookups.answer(question)).degraded
    assert guard.up, "a full house is no failure of the store"
    store.gate.set()
    for answer in await asyncio.gather(*waiting):
        assert not answer.degraded
        assert [m.worker_id for m in answer.matches] == ["w"]
    assert not (await lookups.answer(question)).degraded
