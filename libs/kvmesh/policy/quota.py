"""Rate limits with bursts: how much a tenant may use, and when it may try again.

The generic cell rate algorithm, in the form where usage may be charged after it happened: an
overdrawn bucket refuses until its debt is paid. Times are seconds on any one clock. The same
algorithm in Lua, for several gateways, is in `metadata/quota_store.py`;
tests/contract/test_quota.py
runs both.
Source: ATM Forum TM 4.0 4.4 (GCRA). Tests: tests/unit/policy/test_quota.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Quota(enum.Enum):
    """A tenant's kinds of limits; clients see the value."""

    REQUESTS = "requests_per_min"
    TOKENS = "tokens_per_min"
    CONCURRENCY = "max_concurrent"
    GROUP = "group_share"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant; 0 is no limit.

    Attributes:
        max_concurrent: requests at once.
        priority: tenants with a higher priority are served first while prefill is scarce.
        weight: share among tenants of the same priority while prefill is scarce.
        ttft_ms: longest wait for workers, for requests that name none; 0: as the gateway's.
        tpot_ms: longest mean time per token, likewise.
        itl_ms: longest time between two tokens, likewise.
        group_share: largest share of a group's decode slots that its requests may hold at once, in
            each group by itself.
    """

    requests_per_min: int = 0
    tokens_per_min: int = 0
    max_concurrent: int = 0
    priority: int = 0
    weight: float = 1.0
    ttft_ms: int = 0
    tpot_ms: int = 0
    itl_ms: int = 0
    group_share: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the tenant has no limit over all groups."""
        return not (self.requests_per_min or self.tokens_per_min or self.max_concurrent)


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant of a caller.

    Attributes:
        name: key of its usage; empty for callers without an API key.
        is_known: whether the tenant directory lists it, so that its name may label metrics.
        namespace: part of its cache salts; empty where keys are not checked.
    """

    name: str = ""
    limits: TenantLimits = TenantLimits()
    is_known: bool = False
    namespace: str = ""

    def salted(self, cache_salt: str) -> str:
        """Returns the caller's cache salt within the tenant; salts of two tenants never match.

        A tenant's salt does not match an unchecked caller's either: gateways with and without keys
        may share a mesh.
        """
        space = self.namespace
        return f"{len(space)}:{space}:{cache_salt}" if space or cache_salt else ""

    def in_group(self, group: str, num_slots: int) -> Tenant:
        """Returns the tenant as usage is counted in one group; at least one request may run.

        Args:
            group: name of the group.
            num_slots: decode slots of the group now.
        """
        most = max(int(self.limits.group_share * num_slots), 1)
        # No tenant of the directory has a name with this sign.
        return Tenant(f"{self.name}@{group}", TenantLimits(max_concurrent=most))


@dataclass(frozen=True, slots=True)
class QuotaRefusal:
    """A limit that is used up.

    Attributes:
        retry_after_s: seconds until a retry may succeed; a guess for concurrency.
    """

    quota: Quota
    limit: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate limit, with the burst that may be used at once after a rest.

    Attributes:
        per_min: units per minute; 0 is no limit.
        burst_s: burst in seconds of the rate; at least one unit is always allowed.
    """

    per_min: int
    burst_s: float

    @property
    def interval_s(self) -> float:
        """Seconds per unit at this rate."""
        assert self.per_min > 0, "a rate without limit has no interval"
        return 60.0 / self.per_min

    @property
    def tolerance_s(self) -> float:
        """Seconds by which usage may run ahead of the rate."""
        return max(0.0, self.burst_s - self.interval_s)


def wait_s(busy_until: float, rate: Rate, now: float) -> float:
    """Returns the seconds until the next unit may be used; 0 is now.

    Args:
        busy_until: time at which all usage so far is paid for.
    """
    if not rate.per_min:
        return 0.0
    return max(0.0, busy_until - rate.tolerance_s - now)


def charge(busy_until: float, rate: Rate, units: float, now: float) -> float:
    """Returns the new `busy_until` after using `units`.

    Args:
        busy_until: as in `wait_s`.
        units: may exceed what was left; negative units are a refund.
    """
    if not rate.per_min:
        return busy_until
    return max(busy_until, now) + units * rate.interval_s


@dataclass(slots=True)
class TenantUsage:
    """One tenant's usage as one gateway counts it.

    Attributes:
        num_open: requests that are running.
        requests_until: `busy_until` of its requests; see `wait_s`.
        tokens_until: `busy_until` of its tokens.
    """

    num_open: int = 0
    requests_until: float = 0.0
    tokens_until: float = 0.0


def check_usage(
    usage: TenantUsage, limits: TenantLimits, burst_s: float, now: float
) -> QuotaRefusal | None:
    """Returns the limit that keeps one more request from starting; None: it may start.

    Args:
        usage: the tenant's usage without that request.
        burst_s: see `Rate`.
    """
    if 0 < limits.max_concurrent <= usage.num_open:
        return QuotaRefusal(Quota.CONCURRENCY, limits.max_concurrent, 1.0)
    requests = Rate(limits.requests_per_min, burst_s)
    if (wait := wait_s(usage.requests_until, requests, now)) > 0:
        return QuotaRefusal(Quota.REQUESTS, limits.requests_per_min, wait)
    tokens = Rate(limits.tokens_per_min, burst_s)
    if (wait := wait_s(usage.tokens_until, tokens, now)) > 0:
        return QuotaRefusal(Quota.TOKENS, limits.tokens_per_min, wait)
    return None
