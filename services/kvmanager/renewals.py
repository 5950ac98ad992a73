"""Renews the leases of many idle workers with one call of the store.

A fleet at rest sends one heartbeat per worker every two seconds and nothing else, so a call for
each would be most of what it costs. Tests: tests/unit/kvmanager/test_renewals.py.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from kvmesh.core.slots import Slot
from kvmesh.metadata.store import StoreUnavailableError
from services.kvmanager.guard import StoreGuard

GATHER_S = 0.05
"""Seconds for which the first heartbeat waits for others; little beside a lease."""


class _Waiting(NamedTuple):
    slot: Slot
    sequence: int
    is_renewed: asyncio.Future[bool]


class Renewals:
    """Gathers heartbeats while `run` runs.

    Args:
        writes: limits the number of tasks that change the store at once.
    """

    def __init__(self, guard: StoreGuard, writes: asyncio.Semaphore) -> None:
        self._guard = guard
        self._writes = writes
        self._waiting: list[_Waiting] = []
        self._has_some = asyncio.Event()

    async def renew(self, slot: Slot, sequence: int) -> bool:
        """Renews a slot's lease; False if it has none or is at another sequence.

        Raises:
            StoreUnavailableError: the store is down, or did not answer.
        """
        is_renewed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(slot, sequence, is_renewed))
        self._has_some.set()
        return await is_renewed

    async def run(self) -> None:
        """Renews until cancelled."""
        while True:
            await self._has_some.wait()
            await asyncio.sleep(GATHER_S)
            self._has_some.clear()
            # Sessions that have ended meanwhile cancelled their futures.
            waiting = [each for each in self._waiting if not each.is_renewed.done()]
            self._waiting.clear()
            await self._renew(waiting)

    async def _renew(self, waiting: list[_Waiting]) -> None:
        known = [(each.slot, each.sequence) for each in waiting]
        try:
            async with self._writes:
                found = await self._guard.call(lambda store: store.renew(known))
        except StoreUnavailableError as error:
            for each in waiting:
                if not each.is_renewed.done():
                    each.is_renewed.set_exception(StoreUnavailableError(str(error)))
            return
        for each, is_renewed in zip(waiting, found, strict=True):
            if not each.is_renewed.done():
                each.is_renewed.set_result(is_renewed)
