"""Admission control: tenants' quotas, in this gateway and over all gateways, and drain.

A request is counted first here, then in Redis; either may refuse it. Without Redis, or while it
does not answer, each gateway applies a tenant's full limits by itself.
Tests: tests/unit/gateway/tenants/test_admission.py, tests/integration/test_gateway_tenants.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvmesh.core.types import Refusal, RefusalReason
from kvmesh.policy.quota import Quota, QuotaRefusal, Rate, Tenant, TenantUsage, charge, check_usage
from services.gateway.errors import QuotaError, Stage, StageRefusedError

DRAIN_RETRY_MS = 1000
MAX_IDLE_TENANTS = 4096
"""Maximum number of tenants whose usage is kept although it no longer limits them."""


class SharedQuotas(Protocol):
    """Counts usage over all gateways."""

    async def acquire(self, tenant: Tenant, num_open: int) -> QuotaRefusal | None:
        """Counts a request.

        Returns the limit that is used up; None if there is none or it is unknown.
        """
        ...

    def used(self, tenant: Tenant, num_open: int, num_tokens: int) -> None:
        """Reports usage since the last report; does not wait."""
        ...


class Ticket:
    """An admitted request.

    Attributes:
        tenant: the caller's tenant.
        in_group: the tenant as the request is counted in its group; None: it is in none yet.
        num_tokens: prompt and generated tokens charged so far.

    Args:
        use: called with all charges; None if no limit applies.
        join: see the method.
    """

    def __init__(
        self,
        tenant: Tenant,
        use: Callable[[Tenant, int], None] | None,
        join: Callable[[Tenant], Awaitable[None]],
    ) -> None:
        self.tenant = tenant
        self.in_group: Tenant | None = None
        self.num_tokens = 0
        self._use = use
        self._join = join

    @property
    def joins_group(self) -> bool:
        """Whether its tenant may use a share of a group only, and it is in none yet."""
        return self.tenant.limits.group_share > 0 and self.in_group is None

    async def join(self, group: str, num_slots: int) -> None:
        """Counts the request in the group that is to serve it, until it leaves.

        Args:
            num_slots: decode slots of the group now.

        Raises:
            QuotaError: the tenant's other requests hold its share of the group.
        """
        if not self.joins_group:
            return
        tenant = self.tenant.in_group(group, num_slots)
        try:
            await self._join(tenant)
        except QuotaError as error:
            raise QuotaError(dataclasses.replace(error.used_up, quota=Quota.GROUP)) from error
        self.in_group = tenant

    def charge(self, num_tokens: int) -> None:
        """Counts tokens that were computed for the request."""
        self.num_tokens += num_tokens
        if self._use is not None:
            self._use(self.tenant, num_tokens)


class Admission:
    """Counts requests and tokens, and refuses requests when draining or over quota.

    Args:
        burst_s: size of the token bucket, in seconds of the rate.
        clock: seconds; never goes back.
        shared: counts usage over all gateways; None counts only in this gateway.
    """

    def __init__(
        self, burst_s: float, clock: Callable[[], float], shared: SharedQuotas | None = None
    ) -> None:
        self._burst_s = burst_s
        self._clock = clock
        self._shared = shared
        self._usage: dict[str, TenantUsage] = {}
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_open(self) -> int:
        """Number of requests that were admitted and have not finished."""
        return self._num_open

    async def enter(self, tenant: Tenant) -> Ticket:
        """Admits a request of a tenant, until `leave`.

        Raises:
            StageRefusedError: draining.
            QuotaError: a quota of the tenant is used up.
        """
        if self.draining:
            message = "this gateway is draining; another one will take the request"
            refusal = Refusal(RefusalReason.DRAINING, message, retry_after_ms=DRAIN_RETRY_MS)
            raise StageRefusedError(refusal, Stage.GATEWAY)
        self._num_open += 1
        self._idle.clear()
        is_in = False
        try:
            await self._enter(tenant)
            is_in = True
        finally:
            if not is_in:
                self._ended()
        return Ticket(tenant, None if tenant.limits.is_open else self._use, self._enter)

    async def _enter(self, tenant: Tenant) -> None:
        usage = self._count(tenant)
        if self._shared is not None and not tenant.limits.is_open:
            is_in = False
            try:
                no = await self._shared.acquire(tenant, usage.num_open)
                if no is not None:
                    self._charge_request(usage, tenant, -1)
                    raise QuotaError(no)
                is_in = True
            finally:
                if not is_in:
                    self._release(usage, tenant)

    def leave(self, ticket: Ticket) -> None:
        """Ends an admitted request."""
        for tenant in (ticket.in_group, ticket.tenant):
            if tenant is not None:
                self._release(self._usage[tenant.name], tenant)
        self._ended()

    async def drain(self) -> None:
        """Refuses new requests and waits until all admitted ones have finished."""
        self.draining = True
        await self._idle.wait()

    def _count(self, tenant: Tenant) -> TenantUsage:
        usage = self._usage.get(tenant.name)
        if usage is None:
            usage = self._usage[tenant.name] = TenantUsage()
        if not tenant.limits.is_open:
            no = check_usage(usage, tenant.limits, self._burst_s, self._clock())
            if no is not None:
                raise QuotaError(no)
        usage.num_open += 1
        self._charge_request(usage, tenant, 1)
        return usage

    def _charge_request(self, usage: TenantUsage, tenant: Tenant, count: int) -> None:
        per_min = tenant.limits.requests_per_min
        if per_min:
            rate = Rate(per_min, self._burst_s)
            usage.requests_until = charge(usage.requests_until, rate, count, self._clock())

    def _use(self, tenant: Tenant, num_tokens: int) -> None:
        usage = self._usage[tenant.name]
        rate = Rate(tenant.limits.tokens_per_min, self._burst_s)
        usage.tokens_until = charge(usage.tokens_until, rate, num_tokens, self._clock())
        if self._shared is not None:
            self._shared.used(tenant, usage.num_open, num_tokens)

    def _release(self, usage: TenantUsage, tenant: Tenant) -> None:
        usage.num_open -= 1
        if self._shared is not None and not tenant.limits.is_open:
            self._shared.used(tenant, usage.num_open, 0)
        if usage.num_open == 0 and tenant.limits.is_open:
            del self._usage[tenant.name]
        elif len(self._usage) > MAX_IDLE_TENANTS:
            self._forget_idle()

    def _ended(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()

    def _forget_idle(self) -> None:
        now = self._clock()
        self._usage = {
            name: usage
            for name, usage in self._usage.items()
            if usage.num_open or max(usage.requests_until, usage.tokens_until) > now
        }
