from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kvmesh.core.clock import ManualClock
from kvmesh.core.types import RefusalReason
from kvmesh.policy.quota import Quota, QuotaRefusal, Tenant, TenantLimits
from services.gateway.errors import QuotaError, StageRefusedError, answer_for
from services.gateway.tenants.admission import MAX_IDLE_TENANTS, Admission, Ticket


def tenant(name: str, **limits: Any) -> Tenant:
    return Tenant(name, TenantLimits(**limits))


class Shared:
    """Quotas over all gateways that say what a test tells them to."""

    def __init__(self) -> None:
        self.answer: QuotaRefusal | None = None
        self.acquired: list[int] = []
        self.told: list[tuple[int, int]] = []

    async def acquire(self, tenant: Tenant, num_open: int) -> QuotaRefusal | None:
        self.acquired.append(num_open)
        return self.answer

    def used(self, tenant: Tenant, num_open: int, num_tokens: int) -> None:
        self.told.append((num_open, num_tokens))


def admission(shared: Shared | None = None) -> tuple[Admission, ManualClock]:
    clock = ManualClock(100.0)
    return Admission(10.0, clock.now, shared), clock


@asynccontextmanager
async def place(limits: Admission, who: Tenant) -> AsyncIterator[Ticket]:
    """A place, given back at the end."""
    ticket = await limits.enter(who)
    try:
        yield ticket
    finally:
        limits.leave(ticket)


async def refused(limits: Admission, who: Tenant) -> QuotaError:
    with pytest.raises(QuotaError) as caught:
        async with place(limits, who):
            pass
    return caught.value


async def test_concurrency_is_per_tenant_and_given_back() -> None:
    limits, _ = admission()
    a, b = tenant("a", max_concurrent=1), tenant("b", max_concurrent=1)
    async with place(limits, a):
        async with place(limits, b):
            assert limits.num_open == 2
        error = await refused(limits, a)
        assert error.refusal.reason is RefusalReason.QUOTA
        answer = answer_for(error)
        assert answer.status == 429
        assert answer.headers["x-kvmesh-quota"] == "max_concurrent"
        assert answer.headers["x-kvmesh-refusal"] == "gateway-quota"
        assert answer.headers["Retry-After"] == "1"
    assert limits.num_open == 0
    async with place(limits, a):
        assert limits.num_open == 1


async def test_a_share_of_one_group_is_no_share_of_another() -> None:
    shared = Shared()
    for limits, _ in (admission(), admission(shared)):
        a, b = tenant("a", group_share=0.25), tenant("b", group_share=0.25)
        async with place(limits, a) as first, place(limits, a) as second, place(limits, b) as other:
            await first.join("doc", 7)  # a quarter of which is one, and a half
            with pytest.raises(QuotaError, match="1 requests at once in this group") as caught:
                await second.join("doc", 7)
            assert caught.value.quota is Quota.GROUP
            assert answer_for(caught.value).headers["x-kvmesh-quota"] == "group_share"
            await other.join("doc", 7)
            await second.join("doc", 8)
            assert limits.num_open == 3
            async with place(limits, a) as third:
                await third.join("chat", 1)
        assert limits.num_open == 0
        async with place(limits, a) as again:
            await again.join("doc", 1)
    assert shared.acquired, "gateways count it together"
    shared.answer = QuotaRefusal(Quota.CONCURRENCY, 1, 1.0)
    async with place(limits, tenant("a", group_share=0.25)) as ticket:
        with pytest.raises(QuotaError) as caught:
            await ticket.join("doc", 4)
        assert caught.value.quota is Quota.GROUP
    assert limits.num_open == 0


async def test_requests_per_minute() -> None:
    limits, clock = admission()
    who = tenant("a", requests_per_min=12)  # two at once, then one every five seconds
    for _ in range(2):
        async with place(limits, who):
            pass
    error = await refused(limits, who)
    assert error.quota is Quota.REQUESTS
    assert error.refusal.retry_after_ms == pytest.approx(5000, abs=1)
    clock.advance(5.0)
    async with place(limits, who):
        pass


async def test_tokens_are_charged_when_used_and_the_debt_is_paid_before_the_next_request() -> None:
    limits, clock = admission()
    who = tenant("a", tokens_per_min=600)  # 100 at once
    async with place(limits, who) as ticket:
        ticket.charge(50)
        ticket.charge(150)
    error = await refused(limits, who)
    assert error.quota is Quota.TOKENS
    clock.advance(error.refusal.retry_after_ms / 1000)
    async with place(limits, who):
        pass


async def test_what_the_others_say_counts_and_a_refused_request_has_cost_nothing() -> None:
    shared = Shared()
    limits, _ = admission(shared)
    who = tenant("a", requests_per_min=6, max_concurrent=9)
    shared.answer = QuotaRefusal(Quota.REQUESTS, 6, 3.0)
    for _ in range(3):
        assert (await refused(limits, who)).refusal.retry_after_ms == 3000
    shared.answer = None
    async with place(limits, who) as ticket:
        ticket.charge(7)
    assert shared.acquired == [1, 1, 1, 1]
    assert shared.told == [(0, 0), (0, 0), (0, 0), (1, 7), (0, 0)]
    assert limits.num_open == 0


async def test_a_request_that_is_cancelled_while_it_asks_is_given_back() -> None:
    class Silent(Shared):
        async def acquire(self, tenant: Tenant, num_open: int) -> QuotaRefusal | None:
            await asyncio.Event().wait()
            return None

    limits, _ = admission(Silent())
    task = asyncio.create_task(refused(limits, tenant("a", max_concurrent=1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert limits.num_open == 1
    task.cancel()
    await asyncio.wait({task})
    assert limits.num_open == 0


async def test_callers_that_nothing_limits_are_not_remembered() -> None:
    shared = Shared()
    limits, clock = admission(shared)
    async with AsyncExitStack() as stack:
        for number in range(5):
            await stack.enter_async_context(place(limits, tenant(f"free{number}")))
    assert not limits._usage
    assert not shared.acquired
    for number in range(MAX_IDLE_TENANTS + 10):
        async with place(limits, tenant(f"t{number}", requests_per_min=60_000)):
            clock.advance(0.01)
    assert len(limits._usage) <= MAX_IDLE_TENANTS + 1


async def test_drain_waits_for_what_runs() -> None:
    limits, _ = admission()
    async with place(limits, tenant("a")):
        drain = asyncio.create_task(limits.drain())
        await asyncio.sleep(0)
        assert not drain.done()
        with pytest.raises(StageRefusedError) as caught:
            async with place(limits, tenant("a")):
                pass
        assert caught.value.label == "gateway-draining"
    await drain
