"""The caller's end of `KvPoolService`: asks workers to hold blocks, or to take some.

Tests: tests/unit/rpc/test_pool_client.py, tests/contract/test_prefix_lease.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.types import Endpoint, Reservation
from kvmesh.rpc.channels import NO_ACCESS, MeshAccess, open_channel
from kvmesh.rpc.convert import refusal_from_proto, reservation_from_proto
from kvmesh.v1 import kv_pool_service_pb2 as pb
from kvmesh.v1.kv_pool_service_pb2_grpc import KvPoolServiceStub

if TYPE_CHECKING:  # the name that a stub of an asyncio channel has for type checkers
    from kvmesh.v1.kv_pool_service_pb2_grpc import KvPoolServiceAsyncStub

MAX_CHANNELS = 32
"""Maximum number of open channels, to the workers that were called most recently."""


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    stub: KvPoolServiceAsyncStub
    num_calls: int = 0


class PoolClient:
    """Calls other workers, and keeps connections to a few of them."""

    def __init__(self, access: MeshAccess = NO_ACCESS) -> None:
        self._access = access
        self._peers: OrderedDict[Endpoint, _Peer] = OrderedDict()

    async def lease(
        self, holder: Endpoint, request: pb.LeaseBlocksRequest, timeout_s: float
    ) -> pb.ReadLease:
        """Asks for a lease.

        Raises:
            RefusedError: the holder refused.
            LostError: no answer in time, or an empty one.
        """
        await self._trim(holder)  # before the call: afterwards, a cancel here would lose the lease
        with self._calling(holder) as stub:
            try:
                response = await stub.LeaseBlocks(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                text = f"{holder} leases no blocks: {error.code().name} {error.details() or ''}"
                raise LostError(text.rstrip()) from error
        outcome = response.WhichOneof("outcome")
        if outcome == "refusal":
            raise RefusedError(refusal_from_proto(response.refusal))
        if outcome is None:
            raise LostError(f"{holder} neither leased nor refused")
        return response.lease

    async def release(
        self, holder: Endpoint, request: pb.ReleaseBlocksRequest, timeout_s: float
    ) -> bool:
        """Gives a lease back.

        Returns False if the holder was not reached, so that the lease expires.
        """
        with self._calling(holder) as stub:
            try:
                await stub.ReleaseBlocks(request, timeout=timeout_s)
            except grpc.aio.AioRpcError:
                return False
        return True

    async def store(
        self, holder: Endpoint, request: pb.StoreBlocksRequest, timeout_s: float
    ) -> Reservation | None:
        """Asks for room for a prefix; None if the worker holds all of it.

        Raises:
            RefusedError: the worker refused.
            LostError: no answer in time, or an empty one.
        """
        await self._trim(holder)
        with self._calling(holder) as stub:
            try:
                response = await stub.StoreBlocks(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                text = f"{holder} stores no blocks: {error.code().name} {error.details() or ''}"
                raise LostError(text.rstrip()) from error
        match response.WhichOneof("outcome"):
            case "reservation":
                return reservation_from_proto(response.reservation)
            case "held":
                return None
            case "refusal":
                raise RefusedError(refusal_from_proto(response.refusal))
            case _:
                raise LostError(f"{holder} neither made room nor refused")

    async def close(self) -> None:
        """Ends all connections. May be called again."""
        while self._peers:
            _, peer = self._peers.popitem()
            await peer.channel.close()

    @contextlib.contextmanager
    def _calling(self, holder: Endpoint) -> Iterator[KvPoolServiceAsyncStub]:
        peer = self._peers.get(holder)
        if peer is None:
            channel = open_channel(str(holder), self._access)
            peer = self._peers[holder] = _Peer(channel, KvPoolServiceStub(channel))
        self._peers.move_to_end(holder)
        peer.num_calls += 1
        try:
            yield peer.stub
        finally:
            peer.num_calls -= 1

    async def _trim(self, holder: Endpoint) -> None:
        """Closes the connections that were unused for longest, to make room for one to `holder`."""
        surplus = len(self._peers) + (holder not in self._peers) - MAX_CHANNELS
        idle = [each for each, peer in self._peers.items() if not peer.num_calls and each != holder]
        # Removed from the table before any wait, so that no call starts on a closing channel.
        unused = [self._peers.pop(each) for each in idle[: max(0, surplus)]]
        await asyncio.gather(*(peer.channel.close() for peer in unused))
