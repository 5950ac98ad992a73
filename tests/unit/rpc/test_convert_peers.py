from __future__ import annotations

import dataclasses

from kvmesh.core.peers import Peer, PeerCheck, PeerReport
from kvmesh.core.types import Endpoint, HostRoute, WorkerId
from kvmesh.rpc.convert_peers import (
    MAX_PROBLEM_CHARS,
    peer_report_from_proto,
    peer_report_to_proto,
    peers_from_proto,
    peers_to_proto,
)

ROUTE = HostRoute("host", "/run/kv.sock")
FAR = Peer(WorkerId("d0"), 7, Endpoint("10.0.0.1", 9000))


def test_peers_travel_with_and_without_a_route_within_the_host() -> None:
    peers = (FAR, dataclasses.replace(FAR, worker_id=WorkerId("d1"), host_route=ROUTE))
    assert peers_from_proto(peers_to_proto(peers)) == peers


def test_reports_travel_and_a_long_problem_is_cut() -> None:
    fine = PeerCheck(WorkerId("d0"), 7)
    report = PeerReport(ROUTE, (fine, PeerCheck(WorkerId("d1"), 8, "connection refused")))
    assert peer_report_from_proto(peer_report_to_proto(report)) == report
    assert peer_report_from_proto(peer_report_to_proto(PeerReport())) == PeerReport()
    long = PeerReport(None, (PeerCheck(WorkerId("d1"), 8, "x" * 10_000),))
    message = peer_report_to_proto(long)
    assert message.ByteSize() < MAX_PROBLEM_CHARS + 50
    message.checks[0].problem = "x" * 10_000
    assert peer_report_from_proto(message).checks[0].problem == "x" * MAX_PROBLEM_CHARS
