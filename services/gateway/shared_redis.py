"""The Redis that gateways share: quotas, tenants, and the journal of streams.

Tests: tests/integration/test_gateway_tenants.py, tests/integration/test_gateway_resume.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmesh.metadata.journal_store import RedisJournalStore
from kvmesh.runtime.app import ServiceContext
from services.gateway.config import GatewayConfig
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.journal import Journal

if TYPE_CHECKING:
    from kvmesh.metadata.redis_client import RedisClient

_MIB = 1 << 20


JOURNAL_TIMEOUT_S = 2.0
"""Minimum timeout of the journal, in seconds.

A process without a free core for a moment must not take Redis for dead, since ids grow meanwhile.
"""


def open_redis(config: GatewayConfig, context: ServiceContext) -> RedisClient | None:
    """Opens the Redis that gateways share, closed with `context`; None without one.

    Raises:
        ConfigError: it cannot be used as configured.
    """
    return _client(config, context, config.redis.timeout_s) if config.redis.url else None


def open_journal(
    config: GatewayConfig, context: ServiceContext, metrics: GatewayMetrics
) -> Journal | None:
    """Opens the journal of streams; None if it is switched off or there is no Redis."""
    if not config.redis.url or not config.resume.journal_mib:
        return None
    timeout_s = max(config.redis.timeout_s, JOURNAL_TIMEOUT_S)
    journal = Journal(
        RedisJournalStore(_client(config, context, timeout_s)),
        metrics,
        max_bytes=config.resume.journal_mib * _MIB,
        keep_s=config.resume.keep_s,
        longest_s=config.limits.request_timeout_s,
        timeout_s=timeout_s,
    )
    context.stack.push_async_callback(journal.flush)
    context.spawn(journal.run(), "journal")
    return journal


def _client(config: GatewayConfig, context: ServiceContext, timeout_s: float) -> RedisClient:
    # Imported here: the library takes a quarter of a gateway's import time, and few gateways use
    # it.
    from kvmesh.metadata.redis_client import RedisClient, RedisConfig  # noqa: PLC0415

    redis = config.redis
    client = RedisClient(
        RedisConfig(redis.url, redis.password, redis.key_prefix, timeout_s, redis.password_file)
    )
    context.stack.push_async_callback(client.close)
    return client
