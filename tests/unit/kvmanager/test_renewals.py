from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.slots import Publisher, Slot
from kvmesh.core.types import WorkerId
from kvmesh.metadata.memory_store import MemoryMetadataStore
from kvmesh.metadata.store import StoreUnavailableError
from services.kvmanager.guard import StoreGuard
from services.kvmanager.renewals import Renewals


class CountingStore(MemoryMetadataStore):
    """Notes how many leases each call renews, or fails."""

    def __init__(self) -> None:
        super().__init__(ManualClock(), 10.0)
        self.counts: list[int] = []
        self.fails = False

    async def renew(self, known: Sequence[tuple[Slot, int]]) -> list[bool]:
        self.counts.append(len(known))
        if self.fails:
            raise StoreUnavailableError("told to")
        return await super().renew(known)


@asynccontextmanager
async def renewing(store: CountingStore) -> AsyncIterator[Renewals]:
    async def recovered() -> None:
        """Nobody has to be told."""

    renewals = Renewals(StoreGuard(store, 0.0, recovered), asyncio.Semaphore(1))
    running = asyncio.ensure_future(renewals.run())
    yield renewals
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def slots_of(store: CountingStore, count: int) -> list[Slot]:
    workers = [Publisher(WorkerId(f"w{number}"), 1, "east", "n") for number in range(count)]
    return [(await store.register(worker)).slot for worker in workers]


async def test_heartbeats_share_a_call_and_each_gets_its_answer() -> None:
    store = CountingStore()
    slots = await slots_of(store, 40)
    async with renewing(store) as renewals:
        asked = (renewals.renew(slot, int(index == 3)) for index, slot in enumerate(slots))
        told = await asyncio.gather(*asked)
        assert [index for index, is_renewed in enumerate(told) if not is_renewed] == [3]
        assert await renewals.renew(slots[3], 0)
    assert store.counts == [40, 1]


async def test_a_session_that_ends_meanwhile_is_left_out() -> None:
    store = CountingStore()
    first, second = await slots_of(store, 2)
    async with renewing(store) as renewals:
        ended = asyncio.ensure_future(renewals.renew(first, 0))
        await asyncio.sleep(0)
        ended.cancel()
        assert await renewals.renew(second, 0)
    assert store.counts == [1]


async def test_all_hear_that_the_store_failed_and_the_next_call_is_a_new_one() -> None:
    store = CountingStore()
    slots = await slots_of(store, 3)
    store.fails = True
    async with renewing(store) as renewals:
        asked = (renewals.renew(slot, 0) for slot in slots)
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in told] == [StoreUnavailableError] * 3
        with pytest.raises(StoreUnavailableError, match="the store is down"):
            await renewals.renew(slots[0], 0)
    assert store.counts == [3]
