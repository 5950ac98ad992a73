"""Leases of blocks on other workers: asked for, given back, and never left to run out if avoidable.

A holder that did not answer is left alone for a while. Whoever asks may be cancelled at any time:
a lease that is granted to nobody any more is given back as soon as it is known.
Tests: tests/contract/test_prefix_reader.py, tests/integration/test_interrupted_requests.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvmesh.core.clock import Clock
from kvmesh.core.errors import LostError
from kvmesh.core.types import BlockHash, KvLayout, PrefixSource, WorkerId
from kvmesh.kv.hashing import join_hashes
from kvmesh.rpc.convert import endpoint_from_proto, host_route_from_proto, kv_layout_to_proto
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.transfer.reader import ReadLease
from kvmesh.v1 import kv_pool_service_pb2 as pb

SHUN_S = 5.0
"""A holder that was lost is not asked again for this long: by then routes know, or it is back."""

_RELEASE_TIMEOUT_S = 1.0


class BorrowedLeases:
    """What one worker leases from others.

    Args:
        worker_id: of the worker that reads.
        layout: of its blocks.
        client: closed by its owner.
        timeout_s: for the holder's answer.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        layout: KvLayout,
        client: PoolClient,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._layout = layout
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[Any]] = set()
        self._shunned: dict[tuple[WorkerId, int], float] = {}

    async def borrow(
        self,
        source: PrefixSource,
        hashes: Sequence[BlockHash],
        num_held: int,
        *,
        is_planned: bool = False,
    ) -> pb.ReadLease:
        """Leases what a source has of some blocks; to be given back, whatever comes.

        Args:
            hashes: chained, from the root on.
            num_held: leading blocks that are not wanted.
            is_planned: no request waits for them.

        Raises:
            RefusedError: the source says no.
            LostError: it does not answer, or is another one by now, or was lost a moment ago.
        """
        if self.is_shunned(source):
            raise LostError(f"{source.worker_id} was lost a moment ago")
        try:
            return await self._lease(source, hashes, num_held, is_planned=is_planned)
        except LostError:
            self.shun(source)  # whoever would fetch instead does not wait for it again
            raise

    async def _lease(
        self,
        source: PrefixSource,
        hashes: Sequence[BlockHash],
        num_held: int,
        *,
        is_planned: bool,
    ) -> pb.ReadLease:
        request = pb.LeaseBlocksRequest(
            incarnation=source.incarnation,
            reader_worker_id=self._worker_id,
            layout=kv_layout_to_proto(self._layout),
            block_hashes=join_hashes(hashes),
            num_held=num_held,
            planned=is_planned,
        )
        message = await self._asked(source, request)
        if (message.worker_id, message.incarnation) != (source.worker_id, source.incarnation):
            self.give_back(source, message)
            raise LostError(f"{message.worker_id} answers at this address")
        if message.num_blocks > len(hashes):
            self.give_back(source, message)
            raise LostError(f"{message.num_blocks} of {len(hashes)} blocks are leased")
        return message

    async def _asked(self, source: PrefixSource, request: pb.LeaseBlocksRequest) -> pb.ReadLease:
        """The call outlives its caller: only its answer says what there is to give back."""
        call = asyncio.create_task(
            self._client.lease(source.control_endpoint, request, self._timeout_s)
        )
        self._own(call)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(partial(self._unwanted, source))
            raise

    def _unwanted(self, source: PrefixSource, call: asyncio.Task[pb.ReadLease]) -> None:
        if not call.cancelled() and call.exception() is None:
            self.give_back(source, call.result())

    def give_back(self, source: PrefixSource, lease: pb.ReadLease) -> None:
        """Tells the holder, whoever waits for the prefix; unheard, the lease runs out by itself."""
        request = pb.ReleaseBlocksRequest(
            incarnation=lease.incarnation, lease_id=lease.lease_id, capability=lease.capability
        )
        told = self._client.release(source.control_endpoint, request, _RELEASE_TIMEOUT_S)
        self._own(asyncio.create_task(told))

    def _own(self, call: asyncio.Task[Any]) -> None:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def is_shunned(self, source: PrefixSource) -> bool:
        """Whether it was lost a moment ago."""
        until = self._shunned.get((source.worker_id, source.incarnation), 0.0)
        return self._clock.now() < until

    def shun(self, source: PrefixSource) -> None:
        """It was lost: nobody asks it for a while."""
        now = self._clock.now()
        self._shunned = {name: until for name, until in self._shunned.items() if now < until}
        self._shunned[source.worker_id, source.incarnation] = now + SHUN_S

    async def close(self) -> None:
        """Waits until holders know what was given back. May be called again."""
        while self._calls:  # an answer may be a lease that has to go back
            await asyncio.wait(self._calls)

    @property
    def is_idle(self) -> bool:
        """Nobody is asked, and every holder was told of what was given back."""
        return not self._calls


def lease_of(message: pb.ReadLease) -> ReadLease:
    """A lease as readers and askers show it."""
    return ReadLease(
        lease_id=message.lease_id,
        worker_id=WorkerId(message.worker_id),
        incarnation=message.incarnation,
        generation=message.generation,
        capability=message.capability,
        data_endpoint=endpoint_from_proto(message.data_endpoint),
        host_route=host_route_from_proto(message),
    )
