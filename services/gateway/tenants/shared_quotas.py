"""Quotas over all gateways, in Redis. While it does not answer, only local limits apply.

Usage is reported in the background, many tokens in one call.
Tests: tests/integration/test_gateway_tenants.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.metadata.quota_store import RedisQuotaStore
from kvmesh.metadata.store import StoreUnavailableError
from kvmesh.policy.quota import QuotaRefusal, Tenant
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

LEASE_S = 30.0
SETTLE_S = 0.05
"""Seconds that a usage report is delayed at most."""
PROBE_S = 1.0
"""Seconds without calls to Redis after a failure."""


@dataclass(slots=True)
class _Unsettled:
    tenant: Tenant
    num_open: int
    num_tokens: int


class RedisQuotas:
    """See `admission.SharedQuotas`.

    Args:
        clock: seconds; never goes back.
    """

    def __init__(self, store: RedisQuotaStore, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._unsettled: dict[str, _Unsettled] = {}
        # The requests that Redis counts as open here, until they end or the claim is renewed.
        self._claimed: dict[str, tuple[Tenant, int]] = {}
        self._wake = asyncio.Event()
        self._down_until = 0.0
        self._is_down = False

    async def acquire(self, tenant: Tenant, num_open: int) -> QuotaRefusal | None:
        """See `SharedQuotas.acquire`."""
        if self._clock() < self._down_until:
            return None
        self._claimed[tenant.name] = (tenant, num_open)
        try:
            refusal = await self._store.acquire(tenant.name, tenant.limits, num_open)
        except StoreUnavailableError as error:
            self._failed(error)
            return None
        self._answered()
        return refusal

    def used(self, tenant: Tenant, num_open: int, num_tokens: int) -> None:
        """See `SharedQuotas.used`."""
        entry = self._unsettled.setdefault(tenant.name, _Unsettled(tenant, 0, 0))
        entry.num_open = num_open
        if tenant.name in self._claimed:
            self._claimed[tenant.name] = (tenant, num_open)
        entry.num_tokens += num_tokens
        self._wake.set()

    async def run(self) -> None:
        """Reports usage and renews claims, until cancelled."""
        renew_at = self._clock() + LEASE_S / 3
        while True:
            try:
                async with asyncio.timeout(max(0.0, renew_at - self._clock())):
                    await self._wake.wait()
            except TimeoutError:
                renew_at = self._clock() + LEASE_S / 3
                self._renew_all()
            await asyncio.sleep(SETTLE_S)
            await self.settle()

    async def settle(self) -> None:
        """Reports usage since the last call."""
        self._wake.clear()
        unsettled, self._unsettled = self._unsettled, {}
        for entry in unsettled.values():
            await self._tell(entry)

    async def _tell(self, entry: _Unsettled) -> None:
        tenant = entry.tenant
        if self._clock() < self._down_until:
            return  # local limits have counted it, and Redis starts over
        try:
            await self._store.settle(tenant.name, tenant.limits, entry.num_open, entry.num_tokens)
        except StoreUnavailableError as error:
            self._failed(error)
            return
        self._answered()
        if self._claimed.get(tenant.name, (tenant, 1))[1] == 0:
            del self._claimed[tenant.name]

    def _renew_all(self) -> None:
        for tenant, num_open in tuple(self._claimed.values()):
            self.used(tenant, num_open, 0)

    def _failed(self, error: StoreUnavailableError) -> None:
        self._down_until = self._clock() + PROBE_S
        if not self._is_down:
            log.warning("quotas_without_redis", error=str(error))
        self._is_down = True

    def _answered(self) -> None:
        if self._is_down:
            log.info("quotas_with_redis_again")
        self._is_down = False
