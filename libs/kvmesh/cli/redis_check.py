"""The check of a running Redis by `kvmesh doctor` and `kvmesh up`.

Tests: tests/unit/cli/test_stack_checks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from kvmesh.cli.findings import Finding
from kvmesh.cli.machine_checks import version_numbers
from kvmesh.core.config import environment, without_password
from kvmesh.core.errors import KvMeshError
from kvmesh.metadata.redis_sentinel import RedisMasters, names_sentinels

_OLDEST_REDIS = (6, 2)
_KEEPS_ALL = "noeviction"


async def check_redis_server(url: str, timeout_s: float = 2.0) -> Finding:
    """Checks whether the server answers, and whether services can use it.

    Args:
        timeout_s: maximum seconds for a connection and for an answer.
    """
    shown, password = without_password(url), environment("KVMESH_REDIS__PASSWORD") or None
    try:
        if names_sentinels(url):
            url = await RedisMasters(url, password or "", timeout_s).url()
        async with redis.asyncio.Redis.from_url(
            url,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        ) as client:
            info: Mapping[str, Any] = await client.info()
    except AuthenticationError as error:
        remedy = "set KVMESH_REDIS__PASSWORD, here as for the services"
        return Finding.fail("redis", f"{shown}: {error}", remedy)
    except (RedisError, OSError, ValueError, KvMeshError) as error:
        return Finding.fail("redis", f"{shown}: {error}", "start it, or correct the URL")
    return _judged(shown, info)


def _judged(shown: str, info: Mapping[str, Any]) -> Finding:
    """Compares a Redis's version and settings with the services' requirements."""
    version = str(info.get("redis_version", "0"))
    if version_numbers(version) < _OLDEST_REDIS:
        return Finding.fail("redis", f"version {version}", "use 6.2 or newer")
    policy = info.get("maxmemory_policy", _KEEPS_ALL)
    if info.get("maxmemory") and policy != _KEEPS_ALL:
        remedy = f"set maxmemory-policy {_KEEPS_ALL}: keys that vanish cost cache hits and quotas"
        return Finding.warn("redis", f"{shown}: version {version}, {policy}", remedy)
    return Finding.ok("redis", f"{shown}: version {version}")
