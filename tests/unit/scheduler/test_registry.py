from __future__ import annotations

import asyncio

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import WorkerId
from kvmesh.metadata.memory_store import MemoryFleetStore
from kvmesh.metadata.store import StoreUnavailableError
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet, Membership
from services.scheduler.registry import TTL_LEASES, DurableRegistry
from tests.unit.policy.fleet_examples import worker_info

LEASE_S = 3.0


class BrokenStore(MemoryFleetStore):
    """Fails while told to."""

    broken = True

    async def put_worker(self, worker_id: WorkerId, info: bytes, ttl_s: float) -> None:
        if self.broken:
            raise StoreUnavailableError("gone")
        await super().put_worker(worker_id, info, ttl_s)

    async def list_workers(self) -> dict[WorkerId, bytes]:
        if self.broken:
            raise StoreUnavailableError("gone")
        return await super().list_workers()


class Parts:
    """A scheduler's bookkeeping around a store that may outlive it."""

    def __init__(self, store: MemoryFleetStore, clock: ManualClock) -> None:
        self.fleet = Fleet(LEASE_S)
        self.feed = FleetFeed(self.fleet)
        self.registry = DurableRegistry(store, self.fleet, self.feed, clock, LEASE_S)


async def test_next_scheduler_starts_with_the_members_of_the_last() -> None:
    clock = ManualClock()
    store = MemoryFleetStore(clock)
    before = Parts(store, clock)
    info = worker_info("p")
    before.fleet.register(info, clock.now())
    await before.registry.sync()
    after = Parts(store, clock)
    assert await after.registry.restore() == 1
    assert [each.info for each in after.fleet.workers()] == [info]


async def test_a_worker_that_waits_for_its_peers_is_not_remembered_as_one_that_served() -> None:
    clock = ManualClock()
    store = MemoryFleetStore(clock)
    before = Parts(store, clock)
    before.fleet.register(worker_info("p"), clock.now())
    before.fleet.register(worker_info("q"), clock.now(), waits=True)
    await before.registry.sync()
    assert set(await store.list_workers()) == {"p"}
    before.fleet.hold({})
    await before.registry.sync()
    assert set(await store.list_workers()) == {"p", "q"}


async def test_entries_are_renewed_and_leavers_removed() -> None:
    clock = ManualClock()
    store = MemoryFleetStore(clock)
    parts = Parts(store, clock)
    stays = parts.fleet.register(worker_info("p"), clock.now())
    leaves = parts.fleet.register(worker_info("q"), clock.now())
    assert isinstance(stays, Membership)
    assert isinstance(leaves, Membership)
    await parts.registry.sync()
    parts.fleet.leave(leaves)
    for _ in range(TTL_LEASES + 1):
        clock.advance(LEASE_S)
        await parts.registry.sync()
    assert set(await store.list_workers()) == {"p"}
    clock.advance(TTL_LEASES * LEASE_S)
    assert await store.list_workers() == {}


async def test_unconfirmed_worker_is_not_renewed() -> None:
    clock = ManualClock()
    store = MemoryFleetStore(clock)
    first = Parts(store, clock)
    first.fleet.register(worker_info("p"), clock.now())
    await first.registry.sync()
    second = Parts(store, clock)
    await second.registry.restore()
    clock.advance(TTL_LEASES * LEASE_S)
    await second.registry.sync()
    assert await store.list_workers() == {}


async def test_store_that_is_gone_hurts_nobody_and_is_caught_up_with() -> None:
    clock = ManualClock()
    store = BrokenStore(clock)
    parts = Parts(store, clock)
    assert await parts.registry.restore() == 0
    running = asyncio.create_task(parts.registry.run())
    parts.fleet.register(worker_info("p"), clock.now())
    parts.feed.changed()
    await asyncio.sleep(0)
    store.broken = False
    parts.fleet.register(worker_info("q"), clock.now())
    parts.feed.changed()
    while set(await store.list_workers()) != {"p", "q"}:
        await asyncio.sleep(0)
        assert not running.done()
    running.cancel()
    await asyncio.wait({running})


async def test_entry_that_cannot_be_read_is_left_out() -> None:
    clock = ManualClock()
    store = MemoryFleetStore(clock)
    before = Parts(store, clock)
    await store.put_worker(WorkerId("a"), b"\xff\xff", 10.0)
    before.fleet.register(worker_info("p"), clock.now())
    await before.registry.sync()
    after = Parts(store, clock)
    assert await after.registry.restore() == 1
    assert [each.info.worker_id for each in after.fleet.workers()] == ["p"]
