"""The holder's side of a worker's KV: leases cached blocks to workers that read them by GET.

The rules of leases are in `kv/read_leases.py`; this module gives them a clock, memory and peers.
Tests: tests/contract/test_prefix_lease.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from kvmesh.core.types import (
    BLOCK_HASH_BYTES,
    BlockHash,
    Endpoint,
    HostRoute,
    KvLayout,
    Refusal,
    RefusalReason,
    Reservation,
)
from kvmesh.engine.tiered_cache import TieredCache
from kvmesh.kv.handoff_types import WriteClaim
from kvmesh.kv.hashing import split_hashes
from kvmesh.kv.read_leases import Reader, ReadLeaseStatistics, ReadLeaseTable
from kvmesh.kv.runs import consecutive_runs
from kvmesh.rpc.convert import (
    endpoint_to_proto,
    host_route_to_proto,
    kv_layout_from_proto,
    refusal_to_proto,
    reservation_to_proto,
)
from kvmesh.runtime.stored_prefixes import StoredPrefixes
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.runtime.worker_tiers import load_prefix
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.device import DevicePool, pieces_of
from kvmesh.transfer.frames import GetFrame
from kvmesh.transfer.pacing import Share
from kvmesh.transfer.target import ReadGrant
from kvmesh.v1 import kv_pool_service_pb2 as pb
from kvmesh.v1 import kv_pool_service_pb2_grpc

log = event_logger(__name__)

_EXPIRY_INTERVAL_S = 0.25
_CAPABILITY_BYTES = 16


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Limits of a worker's leases to readers.

    Attributes:
        lease_s: seconds without a read after which a lease ends.
        max_leases: maximum number of open leases. One host gets at most half of
            them, and only an equal part while other hosts are refused some.
        max_share: maximum fraction of the pool's blocks in all leases together; each host's part
            is limited likewise.
    """

    lease_s: float = 5.0
    max_leases: int = 64
    max_share: float = 0.5


class KvPool(kv_pool_service_pb2_grpc.KvPoolServiceServicer):
    """Serves `KvPoolService` and lets others read KV (`transfer.target.ReadSource`)."""

    def __init__(
        self,
        parts: WorkerParts,
        limits: LeaseLimits,
        stores: StoredPrefixes,
        tiers: TieredCache | None = None,
    ) -> None:
        """Sets up the pool.

        Args:
            tiers: tiers below the pool, from which blocks are brought up before they are leased.
        """
        self._tiers = tiers
        self._stores = stores
        self._identity = parts.identity
        self._core = parts.core
        self._memory = parts.memory
        self._clock = parts.clock
        self._lease_ms = round(limits.lease_s * 1000)
        self._table = ReadLeaseTable(
            parts.identity.incarnation,
            limits.lease_s,
            max_leases=limits.max_leases,
            max_blocks=int(limits.max_share * parts.core.pool.num_blocks),
        )
        self._reads: dict[ReadGrant, int] = {}
        self.draining = False
        """The worker accepts no new requests. It still grants leases, until `drain`."""
        self._closed = False
        self._released = asyncio.Event()
        self._coming_up = asyncio.Lock()
        self.read_blocks_total = 0
        """Number of blocks that other workers have read by GET."""
        self.data_endpoint: Endpoint | None = None
        """Address at which leases are read; set when the data server listens."""
        self.host_route: HostRoute | None = None
        """The faster route for readers on this host."""

    # --- the service -------------------------------------------------------------------------

    async def LeaseBlocks(
        self,
        request: pb.LeaseBlocksRequest,
        context: grpc.aio.ServicerContext[pb.LeaseBlocksRequest, pb.LeaseBlocksResponse],
    ) -> pb.LeaseBlocksResponse:
        """Leases the blocks with which a reader can resume a cached prefix."""
        assert self.data_endpoint is not None, "the data server is not up"
        here = self.data_endpoint.host
        reader = reader_of(request.reader_worker_id, context.peer(), here)
        outcome: pb.ReadLease | Refusal | None = self._check(request)
        if outcome is None:
            await self._bring_up(self._hashes(request), request.num_held)
            outcome = self._lease(request, reader)
        if isinstance(outcome, Refusal):
            log.debug(
                "lease_refused",
                reader=request.reader_worker_id,
                reason=outcome.reason.value,
                message=outcome.message,
            )
            return pb.LeaseBlocksResponse(refusal=refusal_to_proto(outcome))
        return pb.LeaseBlocksResponse(lease=outcome)

    async def ReleaseBlocks(
        self,
        request: pb.ReleaseBlocksRequest,
        context: grpc.aio.ServicerContext[pb.ReleaseBlocksRequest, pb.ReleaseBlocksResponse],
    ) -> pb.ReleaseBlocksResponse:
        """Ends a lease early."""
        self._table.close(
            request.lease_id, request.incarnation, request.capability, self._clock.now()
        )
        self._release()
        return pb.ReleaseBlocksResponse()

    async def StoreBlocks(
        self,
        request: pb.StoreBlocksRequest,
        context: grpc.aio.ServicerContext[pb.StoreBlocksRequest, pb.StoreBlocksResponse],
    ) -> pb.StoreBlocksResponse:
        """Makes room for a prefix that the caller will write."""
        outcome: Reservation | Refusal | None = self._check(request)
        if outcome is None and self.draining:
            outcome = Refusal(RefusalReason.DRAINING, "this worker is leaving")
        if outcome is None and len(request.block_hashes) > self._most_hash_bytes:
            most = self._core.pool.num_blocks
            outcome = Refusal(RefusalReason.NO_BLOCKS, f"this worker has {most} blocks")
        if outcome is None:
            outcome = self._stores.refusal()
        if outcome is None:
            hashes = split_hashes(request.block_hashes)
            await self._bring_up(hashes, 0)  # what lies below is not written again
            outcome = self._stores.reserve(hashes)
        if isinstance(outcome, Refusal):
            log.debug("store_refused", reason=outcome.reason.value, message=outcome.message)
            return pb.StoreBlocksResponse(refusal=refusal_to_proto(outcome))
        if outcome is None:
            return pb.StoreBlocksResponse(held=pb.PrefixHeld())
        return pb.StoreBlocksResponse(reservation=reservation_to_proto(outcome))

    def _check(self, request: pb.LeaseBlocksRequest | pb.StoreBlocksRequest) -> Refusal | None:
        if self._closed:
            return Refusal(RefusalReason.DRAINING, "this worker is leaving")
        here = self._identity
        if request.incarnation != here.incarnation:
            text = f"incarnation {request.incarnation}, this is {here.incarnation}"
            return Refusal(RefusalReason.STALE, text)
        layout: KvLayout = kv_layout_from_proto(request.layout)
        if layout != self._core.spec.layout:
            return Refusal(RefusalReason.INVALID, "the caller's KV layout is another one")
        if len(request.block_hashes) % BLOCK_HASH_BYTES:
            return Refusal(RefusalReason.INVALID, "a block hash is cut off")
        return None

    def _hashes(self, request: pb.LeaseBlocksRequest) -> list[BlockHash]:
        # A reader with a larger pool may ask for more than can be here; the rest is ignored.
        return split_hashes(request.block_hashes[: self._most_hash_bytes])

    @property
    def _most_hash_bytes(self) -> int:
        return self._core.pool.num_blocks * BLOCK_HASH_BYTES

    async def _bring_up(self, hashes: Sequence[BlockHash], num_held: int) -> None:
        """Brings up blocks of the prefix from the tiers, one prefix at a time."""
        if self._tiers is None:
            return
        async with self._coming_up:
            fills = self._core.fills
            piece = fills.rooms.next_piece(hashes, num_held)
            await load_prefix(self._tiers, fills.begin(piece))

    def _lease(self, request: pb.LeaseBlocksRequest, reader: Reader) -> pb.ReadLease | Refusal:
        if self._closed:
            return Refusal(RefusalReason.DRAINING, "this worker is leaving")
        here = self._identity
        # If nothing is left, the table refuses one block and says why.
        most = max(self._table.num_left, 1)
        hashes, rooms = self._hashes(request), self._core.fills.rooms
        length, blocks = rooms.leased(hashes, request.num_held, most)
        if not blocks:
            text = f"{length} leading blocks are here, the reader has {request.num_held}"
            return Refusal(RefusalReason.NO_BLOCKS, text)
        capability = secrets.token_bytes(_CAPABILITY_BYTES)
        opened = self._table.open(
            reader, blocks, capability, self._clock.now(), is_planned=request.planned
        )
        if isinstance(opened, Refusal):
            self._core.pool.release(blocks)
            return opened
        assert self.data_endpoint is not None, "the data server is not up"
        return pb.ReadLease(
            lease_id=opened.lease_id,
            worker_id=here.worker_id,
            incarnation=here.incarnation,
            generation=opened.generation,
            capability=capability,
            data_endpoint=endpoint_to_proto(self.data_endpoint),
            host_route=host_route_to_proto(self.host_route),
            num_blocks=length,
            num_leased=len(blocks),
            lease_ms=self._lease_ms,
        )

    # --- reads (ReadSource) ------------------------------------------------------------------

    def begin_read(self, get: GetFrame) -> ReadGrant | Refusal:
        """Returns the memory for the runs of a GET, if the lease table admits it."""
        ticket = self._table.begin_read(
            get.claim,
            [(run.first, run.count) for run in get.runs],
            self._clock.now(),
        )
        if isinstance(ticket, Refusal):
            return ticket
        runs = consecutive_runs(ticket.blocks)
        share = Share.COPY if ticket.is_planned else Share.READ
        if isinstance(self._memory, DevicePool):
            pieces = pieces_of(runs, self._core.spec.layout.block_bytes, None)
            grant = ReadGrant(get, (), pieces, share)
        else:
            views = [self._memory.read_view(first, count) for first, count in runs]
            grant = ReadGrant(get, views, share=share)
        self._reads[grant] = ticket.read_id
        self.read_blocks_total += len(ticket.blocks)
        return grant

    def end_read(self, grant: ReadGrant) -> None:
        """Notes that the channel no longer uses the memory."""
        self._table.end_read(self._reads.pop(grant), self._clock.now())
        self._release()

    def claimed_blocks(self, claim: WriteClaim) -> Sequence[int] | Refusal:
        """The blocks of a lease, for queries about them."""
        return self._table.claimed(claim, self._clock.now())

    # --- ends --------------------------------------------------------------------------------

    async def watch_leases(self) -> None:
        """Ends leases that are not read, forever."""
        while True:
            await asyncio.sleep(_EXPIRY_INTERVAL_S)
            self.expire_leases()

    def expire_leases(self) -> None:
        """Ends the leases that have expired."""
        if num_expired := self._table.expire(self._clock.now()):
            log.warning("leases_expired", num_leases=num_expired)
            self._release()

    async def drain(self) -> None:
        """Grants no more leases, and waits until nobody reads.

        A lease ends within twelve lease times, whatever its reader does.
        """
        self._closed = True
        await self._stores.drain()
        while not self._table.is_idle:
            self._released.clear()
            await self._released.wait()

    def _release(self) -> None:
        for blocks in self._table.drain_released():
            self._core.pool.release(blocks)
            self._released.set()

    # --- state -------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether there is no lease, no read and no write."""
        return self._table.is_idle and not self._reads and not self._stores.num_open

    def statistics(self) -> ReadLeaseStatistics:
        """Statistics of the leases."""
        return self._table.statistics()

    def check_integrity(self) -> None:
        """Raises AssertionError if the records contradict each other."""
        self._table.check_integrity()
        assert self._table.statistics().num_reads == len(self._reads)


def reader_of(worker_id: str, peer: str, here: str) -> Reader:
    """The reader for which a lease is counted. A name can be forged, a connection's host cannot.

    All workers of another host share one host's part. Workers of this host are distinguished by
    their names: processes on this host are trusted with more than leases.

    Args:
        worker_id: the reader's own name for itself.
        peer: of the call, in gRPC's format: `ipv4:10.0.0.7:4711`, `ipv6:%5B::1%5D:4711`, `unix:`.
        here: this worker's advertised address; calls from the same host may come from it, too.
    """
    neighbour = Reader(worker_id, worker_id)
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return neighbour
    host = urllib.parse.unquote(address).rpartition(":")[0].strip("[]")
    try:
        is_here = ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return neighbour
    return neighbour if is_here or host == here.strip("[]") else Reader(host, worker_id)
