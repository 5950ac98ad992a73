"""Who holds blocks that others may ask about, and by what right they do.

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
    """Who is asked, and by what right.

    Attributes:
        peer: one life of a worker.
        kind, claim: what names the blocks there.
    """

    peer: PeerKey
    data_endpoint: Endpoint
    host_route: HostRoute | None
    kind: ClaimKind
    claim: WriteClaim

    @classmethod
    def of_reservation(cls, reservation: Reservation) -> Holder:
        """The worker that has reserved, for the blocks that it had cached."""
        return cls(
            PeerKey(reservation.worker_id, reservation.incarnation),
            reservation.data_endpoint,
            reservation.host_route,
            ClaimKind.RESERVATION,
            claim_of(reservation),
        )

    @classmethod
    def of_lease(cls, lease: ReadLease) -> Holder:
        """The worker that leases some of its blocks."""
        return cls(
            PeerKey(lease.worker_id, lease.incarnation),
            lease.data_endpoint,
            lease.host_route,
            ClaimKind.LEASE,
            lease.claim,
        )
