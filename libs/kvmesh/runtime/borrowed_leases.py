"""Leases of blocks on other workers: requests them and gives them back before they run out.

A holder that did not answer is not asked for a while. The caller may be cancelled at any time: if a
lease arrives after that, it is given back at once.
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
"""Seconds in which a lost holder is not asked again. By then routes avoid it, or it is back."""

_RELEASE_TIMEOUT_S = 1.0


class BorrowedLeases:
    """The leases that one worker has on other workers.

    Args:
        worker_id: the worker that reads.
        layout: layout of its blocks.
        client: closed by its owner.
        timeout_s: longest wait for the holder's answer.
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
        """Leases blocks of a source; the caller must give the lease back in any case.

        Args:
            hashes: chained, from the root on.
            num_held: number of leading blocks that the caller already has.
            is_planned: no request waits for them.

        Raises:
            RefusedError: the source refuses.
            LostError: it does not answer, another incarnation answers, or it was lost a moment ago.
        """
        if self.is_shunned(source):
            raise LostError(f"{source.worker_id} was lost a moment ago")
        try:
            return await self._lease(source, hashes, num_held, is_planned=is_planned)
        except LostError:
            self.shun(source)  # other fetches then do not wait for it again
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
        """Makes the call, which outlives a cancelled caller: only its answer names the lease."""
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

    def give_back(self, source: PrefixSource, lease: pb.ReadLease) -> asyncio.Task[bool]:
        """Tells the holder, without waiting, that the lease ends. Unheard, it expires.

        Returns:
            A task that ends when the holder knows, or is not heard for a second.
        """
        request = pb.ReleaseBlocksRequest(
            incarnation=lease.incarnation, lease_id=lease.lease_id, capability=lease.capability
        )
        told = self._client.release(source.control_endpoint, request, _RELEASE_TIMEOUT_S)
        task = asyncio.create_task(told)
        self._own(task)
        return task

    def _own(self, call: asyncio.Task[Any]) -> None:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def is_shunned(self, source: PrefixSource) -> bool:
        """Whether the source was lost a moment ago."""
        until = self._shunned.get((source.worker_id, source.incarnation), 0.0)
        return self._clock.now() < until

    def shun(self, source: PrefixSource) -> None:
        """Notes that the source was lost, so that it is not asked for a while."""
        now = self._clock.now()
        self._shunned = {name: until for name, until in self._shunned.items() if now < until}
        self._shunned[source.worker_id, source.incarnation] = now + SHUN_S

    async def close(self) -> None:
        """Waits until the holders know all returned leases. May be called again."""
        while self._calls:  # an answer may be a lease that must be given back
            await asyncio.wait(self._calls)

    @property
    def is_idle(self) -> bool:
        """Whether no call is open: no holder is asked, and all returned leases were reported."""
        return not self._calls


def lease_of(message: pb.ReadLease) -> ReadLease:
    """Converts a lease to the form that readers and query senders use."""
    return ReadLease(
        lease_id=message.lease_id,
        worker_id=WorkerId(message.worker_id),
        incarnation=message.incarnation,
        generation=message.generation,
        capability=message.capability,
        data_endpoint=endpoint_from_proto(message.data_endpoint),
        host_route=host_route_from_proto(message),
    )
