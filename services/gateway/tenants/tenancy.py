"""Builds keys, tenants and quotas. Tests: tests/integration/test_gateway_tenants.py."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from kvmesh.core.clock import SystemClock
from kvmesh.metadata.quota_store import RedisQuotaStore
from kvmesh.metadata.tenant_store import RedisTenantStore
from kvmesh.policy.quota import TenantLimits
from kvmesh.runtime.app import ServiceContext
from services.gateway.config import GatewayConfig
from services.gateway.tenants.access import DirectoryWatch, KeyRing, directory_store, load_keys
from services.gateway.tenants.admission import Admission
from services.gateway.tenants.shared_quotas import LEASE_S, RedisQuotas

if TYPE_CHECKING:
    from kvmesh.metadata.redis_client import RedisClient


async def open_tenancy(
    config: GatewayConfig, context: ServiceContext, client: RedisClient | None
) -> tuple[KeyRing, Admission]:
    """Makes the key ring and the admission of a gateway, which tasks of `context` keep up to date.

    Args:
        client: client of the Redis that gateways share; None without one.

    Raises:
        ConfigError: keys, the directory or Redis cannot be used as configured.
    """
    quota = config.quota
    defaults = TenantLimits(
        requests_per_min=quota.requests_per_min_per_key,
        tokens_per_min=quota.tokens_per_min_per_key,
        max_concurrent=quota.max_concurrent_per_key,
    )
    keys = load_keys(config.access, defaults)
    store = directory_store(config.access, RedisTenantStore(client) if client else None)
    if store is not None:
        watch = DirectoryWatch(store, keys, config.access.refresh_s)
        await watch.look()
        context.spawn(watch.run(), "tenant directory")
    clock = SystemClock()
    if client is None:
        return keys, Admission(quota.burst_s, clock.now)
    usage = RedisQuotaStore(client, secrets.token_hex(8), quota.burst_s, LEASE_S)
    shared = RedisQuotas(usage, clock.now)
    context.stack.push_async_callback(shared.settle)
    context.spawn(shared.run(), "quotas")
    return keys, Admission(quota.burst_s, clock.now, shared)
