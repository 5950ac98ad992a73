"""A circuit breaker around the store: after a failure, calls fail at once until a probe succeeds.

Tests: tests/unit/kvmanager/test_guard.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvmesh.metadata.store import MetadataStore, StoreUnavailableError
from kvmesh.telemetry.logs import event_logger
from services.kvmanager import metrics

ResultT = TypeVar("ResultT")

log = event_logger(__name__)


class StoreGuard:
    """Passes calls to the store while it answers.

    Args:
        on_recovered: awaited each time the store answers again after a failure. It may call
            through the guard; a failure there counts as the next failure.
    """

    def __init__(
        self,
        store: MetadataStore,
        probe_interval_s: float,
        on_recovered: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._probe_interval_s = probe_interval_s
        self._on_recovered = on_recovered
        self._failed = asyncio.Event()

    @property
    def up(self) -> bool:
        """Whether the guard passes calls to the store."""
        return not self._failed.is_set()

    async def start(self) -> None:
        """Probes the store once; the store need not answer."""
        metrics.REDIS_UP.set(1)
        try:
            await self._store.probe()
        except StoreUnavailableError as error:
            self._fail(error)

    async def call(
        self,
        ask: Callable[[MetadataStore], Awaitable[ResultT]],
        timeout_s: float | None = None,
    ) -> ResultT:
        """Calls the store.

        Args:
            timeout_s: a call that takes longer has failed; None uses only the store's own timeout.

        Raises:
            StoreUnavailableError: the store is down, or this call failed.
        """
        if not self.up:
            raise StoreUnavailableError("the store is down")
        try:
            async with asyncio.timeout(timeout_s):
                return await ask(self._store)
        except TimeoutError as error:
            late = StoreUnavailableError(f"no answer within {timeout_s} s")
            self._fail(late)
            raise late from error
        except StoreUnavailableError as error:
            self._fail(error)
            raise

    async def run(self) -> None:
        """Probes while the store is down, until cancelled."""
        while True:
            await self._failed.wait()
            try:
                await self._store.probe()
            except StoreUnavailableError:
                await asyncio.sleep(self._probe_interval_s)
                continue
            self._failed.clear()
            metrics.REDIS_UP.set(1)
            log.info("store_up")
            await self._on_recovered()

    def _fail(self, error: StoreUnavailableError) -> None:
        if self.up:
            log.warning("store_down", error=str(error))
        metrics.REDIS_UP.set(0)
        self._failed.set()
