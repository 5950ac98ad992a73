"""Converts peers and the results of checking them to messages and back.

Tests: tests/unit/rpc/test_convert_peers.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.core.peers import Peer, PeerCheck, PeerReport
from kvmesh.core.types import WorkerId
from kvmesh.rpc.convert import (
    endpoint_from_proto,
    endpoint_to_proto,
    host_route_from_proto,
    host_route_to_proto,
)
from kvmesh.v1 import scheduler_service_pb2 as pb

MAX_PROBLEM_CHARS = 200

MAX_CHECKS = 4096
"""Maximum number of results of one worker; a scheduler ignores the others."""


def peers_to_proto(peers: Iterable[Peer]) -> pb.WorkerPeers:
    """Peers as a message."""
    return pb.WorkerPeers(
        peers=[
            pb.WorkerPeer(
                worker_id=each.worker_id,
                incarnation=each.incarnation,
                data_endpoint=endpoint_to_proto(each.data_endpoint),
                host_route=host_route_to_proto(each.host_route),
            )
            for each in peers
        ]
    )


def peers_from_proto(message: pb.WorkerPeers) -> tuple[Peer, ...]:
    """Peers from a message."""
    return tuple(
        Peer(
            WorkerId(each.worker_id),
            each.incarnation,
            endpoint_from_proto(each.data_endpoint),
            host_route_from_proto(each),
        )
        for each in message.peers
    )


def peer_report_to_proto(report: PeerReport) -> pb.PeerReport:
    """PeerReport as a message."""
    return pb.PeerReport(
        host_route=host_route_to_proto(report.host_route),
        checks=[
            pb.PeerCheck(
                worker_id=each.worker_id,
                incarnation=each.incarnation,
                problem=each.problem[:MAX_PROBLEM_CHARS],
            )
            for each in report.checks
        ],
    )


def peer_report_from_proto(message: pb.PeerReport) -> PeerReport:
    """PeerReport from a message."""
    checks = (
        PeerCheck(WorkerId(each.worker_id), each.incarnation, each.problem[:MAX_PROBLEM_CHARS])
        for each in message.checks[:MAX_CHECKS]
    )
    return PeerReport(host_route_from_proto(message), tuple(checks))
