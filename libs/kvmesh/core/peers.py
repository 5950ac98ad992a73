"""Peers to which a worker must be able to send KV, and the result of checking them.

Tests: tests/unit/rpc/test_convert_peers.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.types import Endpoint, HostRoute, WorkerId


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker that receives KV.

    Attributes:
        host_route: route for senders on its host; None: by network only.
    """

    worker_id: WorkerId
    incarnation: int
    data_endpoint: Endpoint
    host_route: HostRoute | None = None


@dataclass(frozen=True, slots=True)
class PeerCheck:
    """The result of connecting to a peer.

    Attributes:
        problem: why no KV can be sent there; empty: it can.
    """

    worker_id: WorkerId
    incarnation: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """How peers reach a worker, and which peers it reached.

    Attributes:
        host_route: see `Peer`.
        checks: the results so far; a peer that was not tried yet is absent.
    """

    host_route: HostRoute | None = None
    checks: tuple[PeerCheck, ...] = ()
