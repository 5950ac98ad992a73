"""Finds the nodes of a Redis Cluster.

Tests: tests/integration/test_redis_cluster.py.
"""

from __future__ import annotations

from typing import Any

from kvmesh.metadata.redis_library import ResponseError, redis

_UNUSABLE = ("fail", "noaddr", "handshake")


async def cluster_addresses(client: redis.Redis) -> list[tuple[str, int]]:
    """Returns host and port of the nodes that a server knows; none if it is not in a cluster.

    The host is empty if a node does not know its own address.
    """
    ask: Any = client.execute_command  # has no types
    try:
        # As two words, the library leaves the answer as it is: its parser fails on malformed ones.
        nodes: object = await ask("CLUSTER", "NODES")
    except ResponseError:
        return []  # not a cluster, or a proxy that does not know the command
    if isinstance(nodes, bytes):
        nodes = nodes.decode(errors="replace")
    return _addresses(nodes) if isinstance(nodes, str) else []


def _addresses(nodes: str) -> list[tuple[str, int]]:
    """Reads lines of `id host:port@bus flags ...`."""
    addresses = []
    for line in nodes.splitlines():
        _, address, flags = (*line.split(" "), "", "", "")[:3]
        host, _, port = address.partition("@")[0].rpartition(":")
        if port.isdecimal() and not any(flag in _UNUSABLE for flag in flags.split(",")):
            addresses.append((host, int(port)))
    return addresses
