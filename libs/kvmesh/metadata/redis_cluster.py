"""Finds the nodes of a Redis Cluster.

Tests: tests/integration/test_redis_cluster.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvmesh.metadata.redis_library import ResponseError, redis

_UNUSABLE = ("fail", "noaddr", "handshake")


async def cluster_addresses(client: redis.Redis) -> list[tuple[str, int]]:
    """Returns host and port of the nodes that a server knows; none if it is not in a cluster.

    The host is empty if a node does not know its own address.
    """
    ask: Callable[..., Awaitable[Mapping[str, Any]]] = client.execute_command
    try:
        found = await ask("CLUSTER NODES")
    except ResponseError:
        return []  # not a cluster, or a proxy that does not know the command
    addresses = []
    for address, told in found.items():
        host, _, port = address.rpartition(":")
        if not any(flag in _UNUSABLE for flag in str(told["flags"]).split(",")):
            addresses.append((host, int(port)))
    return addresses
