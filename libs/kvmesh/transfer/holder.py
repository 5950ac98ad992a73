"""Holders: workers with blocks that other workers may query.

Tests: tests/contract/test_queries.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.types import Endpoint, HostRoute, Reservation
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.transfer.attend import ClaimKind
from kvmesh.transfer.greeting import PeerKey
from kvmesh.transfer.lane import claim_of
from kvmesh.transfer.reader import ReadLease


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker to query, and the right to do so.

    Attributes:
        peer: the worker's incarnation.
        kind, claim: name the blocks at the holder.
    """

    peer: PeerKey
    data_endpoint: Endpoint
    host_route: HostRoute | None
    kind: ClaimKind
    claim: WriteClaim

    @classmethod
    def of_reservation(cls, reservation: Reservation) -> Holder:
        """Returns the worker that made a reservation, for the blocks that it had cached."""
        return cls(
            PeerKey(reservation.worker_id, reservation.incarnation),
            reservation.data_endpoint,
            reservation.host_route,
            ClaimKind.RESERVATION,
            claim_of(reservation),
        )

    @classmethod
    def of_lease(cls, lease: ReadLease) -> Holder:
        """Returns the worker that leases some of its blocks."""
        return cls(
            PeerKey(lease.worker_id, lease.incarnation),
            lease.data_endpoint,
            lease.host_route,
            ClaimKind.LEASE,
            lease.claim,
        )
