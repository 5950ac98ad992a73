"""redis-py without its own metrics: KVMesh does not use them, and they cost 3 MiB and 0.05 s.

Tests: tests/unit/runtime/test_loading.py.
"""

from __future__ import annotations

from kvmesh.core.loading import without

with without("opentelemetry.metrics", "opentelemetry.sdk.metrics"):
    import redis.asyncio as redis
    from redis.asyncio.connection import parse_url
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import MovedError, NoScriptError, RedisError, ResponseError

__all__ = [
    "MovedError",
    "NoBackoff",
    "NoScriptError",
    "RedisError",
    "ResponseError",
    "Retry",
    "parse_url",
    "redis",
]
