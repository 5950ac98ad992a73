"""Brings cached prefixes from other workers: lease at the holder, GET into blocks, give it back.

The blocks are those of the waiting sequence, or fresh ones for the prefix cache. If one request
fetches a prefix, other requests for it wait for that fetch. In every case no lease or block is held
afterwards, and a fetch never fails: its result is the number of leading blocks that are here, and
the engine computes the rest.
Tests: tests/contract/test_prefix_reader.py, tests/integration/test_shared_fetch.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmesh.core.clock import Clock
from kvmesh.core.details import COPY, GET
from kvmesh.core.errors import LostError, RefusedError
from kvmesh.core.kv_groups import KvGroups
from kvmesh.core.types import BlockHash, PrefixSource, WorkerId
from kvmesh.engine.core import EngineCore
from kvmesh.engine.prefix_fill import PrefixFill
from kvmesh.engine.protocol import KvMemory
from kvmesh.engine.sequence import Sequence as EngineSequence
from kvmesh.kv.runs import consecutive_runs
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime.borrowed_leases import BorrowedLeases, lease_of
from kvmesh.runtime.fetch_result import FetchOptions, FetchOutcome, FetchResult
from kvmesh.runtime.pool_metrics import PoolMetrics
from kvmesh.runtime.shared_fetches import Flight, SharedFetches
from kvmesh.runtime.worker_parts import WorkerIdentity, WorkerParts
from kvmesh.telemetry.logs import event_logger
from kvmesh.transfer.device import pieces_of
from kvmesh.transfer.frames import BlockRun
from kvmesh.transfer.memory import write_views
from kvmesh.transfer.meters import LinkKey, LinkMeter, LinkMeters, TransferStatistics
from kvmesh.transfer.reader import BlockReader, ReadLease
from kvmesh.transfer.staging import StagingRing
from kvmesh.v1 import kv_pool_service_pb2 as pb

log = event_logger(__name__)

SLICE_BYTES = 64 << 20
"""Maximum bytes of a slice. In a plain layout, complete slices count if the rest is lost."""

FIRST_SLICE_BYTES = 2 << 20
"""Bytes of the first slice; each further slice is twice as large.

If a fetch runs out of time, the link's speed has then been measured, so that routes know that
fetching does not pay.
"""

COPY_SLICE_BYTES = 4 << 20
"""Maximum bytes of a slice that no request waits for.

A copy gives way only between two slices, and a large slice takes long at the speed of a copy.
"""


class _NoRoomError(Exception):
    """This worker has too few free blocks."""


class _GiveWayError(Exception):
    """A request wants the blocks of a planned fetch: it brings the rest itself, and faster."""


@dataclass(slots=True)
class _Fetch:
    """The state of a fetch in progress.

    Attributes:
        leads: it asked the holder itself.
        is_planned: no request waits for it.
        gave_way: it stopped for a request, which brings the rest.
    """

    outcome: FetchOutcome = FetchOutcome.HELD
    num_fetched: int = 0
    num_bytes: int = 0
    reason: str = ""
    leads: bool = False
    is_planned: bool = False
    gave_way: bool = False


class PrefixFetcher:
    """Fetches prefixes into the blocks of one worker.

    Args:
        reader: of the same layout; closed by its owner.
        client: closed by its owner.
        on_stored: called when blocks came into the prefix cache.
        staging: buffers for blocks of a device pool; None for a pool in host memory.
    """

    def __init__(
        self,
        parts: WorkerParts,
        reader: BlockReader,
        client: PoolClient,
        options: FetchOptions,
        metrics: PoolMetrics,
        on_stored: Callable[[], None],
        staging: StagingRing | None = None,
    ) -> None:
        self._staging = staging
        self._identity: WorkerIdentity = parts.identity
        self._core: EngineCore = parts.core
        self._memory: KvMemory = parts.memory
        self._clock: Clock = parts.clock
        self._reader = reader
        self._options = options
        self._metrics = metrics
        self._on_stored = on_stored
        self._block_bytes = parts.core.spec.layout.block_bytes
        self.leases = BorrowedLeases(
            parts.identity.worker_id,
            parts.core.spec.layout,
            client,
            parts.clock,
            options.lease_timeout_s,
        )
        self._links = LinkMeters()
        self._shared = SharedFetches()

    async def fetch(self, source: PrefixSource, hashes: Sequence[BlockHash]) -> FetchResult:
        """Brings a prefix into the prefix cache, as a copy that no request waits for.

        Args:
            hashes: chained, from the root on; later blocks are not touched.
        """
        return await self._run(source, self._core.fills.begin(hashes), is_planned=True)

    async def fill(self, source: PrefixSource, sequence: EngineSequence) -> FetchResult:
        """Brings blocks that a sequence would have to compute into its own blocks.

        The sequence is HELD and runs only afterwards; it may be released at any time. After this
        call is cancelled, nothing writes into its blocks any more.
        """
        return await self._run(source, self._core.begin_fill(sequence), is_planned=False)

    async def _run(
        self, source: PrefixSource, fill: PrefixFill, *, is_planned: bool
    ) -> FetchResult:
        started = self._clock.now()
        try:
            fetch = await self._try(source, fill, _Fetch(is_planned=is_planned))
            now_here = fill.num_held
        finally:
            fill.end()
        seconds = self._clock.now() - started
        result = FetchResult(
            fetch.outcome, now_here, fetch.num_fetched, fetch.num_bytes, seconds, fetch.reason
        )
        self._metrics.fetches.labels(fetch.outcome.value, fetch.reason).inc()
        self._metrics.fetch_seconds.labels(fetch.outcome.value).observe(seconds)
        if result.num_fetched:
            self._metrics.fetched_tokens.inc(result.num_fetched * self._core.block_size)
            self._on_stored()
        return result

    async def _try(self, source: PrefixSource, fill: PrefixFill, fetch: _Fetch) -> _Fetch:
        """Brings the prefix, or waits for other fetches that bring it."""
        most = min(len(fill.hashes), source.num_blocks)
        if source.worker_id == self._identity.worker_id:
            return fetch
        waited = False  # another fetch used up the time, which does not prove the holder slow
        fill.adopt()  # other requests may have computed these blocks after the reservation
        try:
            async with asyncio.timeout(self._options.timeout_s):
                while fill.num_held < most:
                    flight = self._shared.bringing(fill.hashes[fill.num_held])
                    if flight is None:
                        await self._lead(source, fill, most, fetch)
                        if not fetch.gave_way:
                            break
                        fetch.gave_way = False
                        await asyncio.sleep(0)  # lets the waiting request continue first
                        continue
                    waited = True
                    flight.is_wanted |= not fetch.is_planned
                    await flight.over.wait()
                    if fill.adopt():
                        fetch.outcome = FetchOutcome.SHARED
                    if fill.num_held >= most:
                        break
                    if flight.answers_for(source, fill.hashes[fill.num_held]):
                        refused = bool(flight.reason)
                        fetch.outcome = FetchOutcome.REFUSED if refused else FetchOutcome.SHARED
                        fetch.reason = flight.reason
                        break
        except TimeoutError:
            fetch.outcome = FetchOutcome.TIMEOUT
            # A copy that made progress is slow because all other traffic goes first. Its holder is
            # well, and requests must not avoid it.
            is_late_copy = fetch.is_planned and fetch.num_fetched > 0
            if fetch.leads and not waited and not is_late_copy:
                log.warning("fetch_timed_out", holder=source.worker_id)
                self.leases.shun(source)
        return fetch

    async def _lead(self, source: PrefixSource, fill: PrefixFill, most: int, fetch: _Fetch) -> None:
        """Fetches, and notifies the waiting requests of the result.

        Raises:
            TimeoutError, CancelledError: from the caller; blocks that have arrived count.
        """
        if self.leases.is_shunned(source):
            fetch.outcome = FetchOutcome.SHUNNED
            return
        fetch.leads = True
        held = fill.num_held
        with self._shared.flight(source, fill.hashes[held:most]) as flight:
            try:
                await self._bring_pieces(source, fill, most, flight, fetch)
                fetch.outcome, flight.settled = FetchOutcome.FETCHED, True
            except RefusedError as error:
                fetch.outcome, fetch.reason = FetchOutcome.REFUSED, error.refusal.reason.value
                flight.settled, flight.reason = True, fetch.reason
            except _GiveWayError:
                fetch.outcome, fetch.gave_way = FetchOutcome.FETCHED, True
            except _NoRoomError:
                fetch.outcome = FetchOutcome.NO_ROOM
            except LostError as error:
                log.warning("fetch_lost", holder=source.worker_id, error=str(error))
                self.leases.shun(source)
                fetch.outcome = FetchOutcome.LOST
            finally:
                fetch.num_fetched += fill.num_held - held

    def estimate_s(self, source: PrefixSource, num_blocks: int) -> float | None:
        """Seconds until `num_blocks` blocks of a source would be here for a waiting request.

        None while that is unknown. Copies, which give way to all other traffic, are not measured.
        """
        key = LinkKey(source.worker_id, GET, "received")
        return self._links.of(key).view(key).estimate_s(num_blocks * self._block_bytes)

    async def _bring_pieces(
        self, source: PrefixSource, fill: PrefixFill, most: int, flight: Flight, fetch: _Fetch
    ) -> None:
        """Brings up to `most` blocks, in as many leases as the holder needs for them.

        A holder lends as many blocks as fit into its pool beside its requests, within its limits.
        """
        is_first = True
        while True:
            held = fill.num_held
            try:
                message = await self.leases.borrow(
                    source, fill.hashes, held, is_planned=fetch.is_planned
                )
            except RefusedError as error:
                if is_first:
                    raise
                flight.reason = error.refusal.reason.value  # the rest is gone, or others read
                return
            is_first = False
            try:
                fetch.num_bytes += await self._bring(message, fill, flight, fetch.is_planned)
            except _GiveWayError:
                fetch.num_bytes += (fill.num_held - held) * self._block_bytes
                raise
            finally:
                returned = self.leases.give_back(source, message)
            if not held < fill.num_held < most or self._core.spec.groups != KvGroups():
                return
            await asyncio.wait((returned,))  # the next piece takes the room of this one

    async def _bring(
        self, message: pb.ReadLease, fill: PrefixFill, flight: Flight, is_planned: bool
    ) -> int:
        """Reads the blocks of a lease. Returns the number of bytes read."""
        if not fill.num_held < message.num_blocks:
            raise LostError(f"{message.num_blocks} blocks are leased, {fill.num_held} are here")
        blocks = fill.open(message.num_blocks)
        if blocks is None:
            raise _NoRoomError
        kind = COPY if is_planned else GET
        meter = self._links.of(LinkKey(WorkerId(message.worker_id), kind, "received"))
        num_bytes = len(blocks) * self._block_bytes
        meter.begin(num_bytes, self._clock.now())
        try:
            if message.num_leased != len(blocks):
                fill.close(0)
                text = f"{message.num_leased} blocks are leased, {len(blocks)} are missing"
                raise LostError(text)
            # In other layouts, no block counts before all blocks are here.
            may_give_way = is_planned and self._core.spec.groups.is_plain
            way = flight if may_give_way else None
            await self._read(lease_of(message), fill, blocks, meter, way)
        finally:
            meter.end(num_bytes, self._clock.now())
        meter.frames += 1
        return num_bytes

    async def _read(
        self,
        lease: ReadLease,
        fill: PrefixFill,
        blocks: Sequence[int],
        meter: LinkMeter,
        way: Flight | None,
    ) -> None:
        """Reads slice by slice into open blocks, and closes them in any case.

        Args:
            way: the flight, if the read gives way to requests that want the blocks; else None.
        """
        most = SLICE_BYTES if self._staging is None else self._staging.piece_bytes
        most = most if way is None else min(most, COPY_SLICE_BYTES)
        size = min(FIRST_SLICE_BYTES, most)
        num_filled = 0
        try:
            while num_filled < len(blocks):
                step = max(1, size // self._block_bytes)
                chosen = blocks[num_filled : num_filled + step]
                run = BlockRun(num_filled, len(chosen))
                await self._read_runs(lease, run, consecutive_runs(chosen))
                num_filled += len(chosen)
                meter.bytes += len(chosen) * self._block_bytes
                size = min(2 * size, most)
                if num_filled < len(blocks) and way is not None and way.is_wanted:
                    raise _GiveWayError
        finally:
            fill.close(num_filled)

    async def _read_runs(
        self, lease: ReadLease, leased: BlockRun, runs: Sequence[tuple[int, int]]
    ) -> None:
        if self._staging is not None:
            pieces = pieces_of(runs, self._block_bytes, None)
            async with self._staging.landing(pieces, lease.worker_id) as landing:
                await self._reader.get(lease, [leased], landing.views)
                await landing.land()
            return
        await self._reader.get(
            lease, [leased], write_views(self._memory, runs, self._block_bytes, None)
        )
        for block, length in runs:
            self._memory.written(block, length)

    async def close(self) -> None:
        """Waits until the holders know all returned leases. May be called again."""
        await self.leases.close()

    def statistics(self) -> TransferStatistics:
        """Statistics of the reads, by holder."""
        return TransferStatistics(0, self._links.links)

    @property
    def is_idle(self) -> bool:
        """Whether no prefix is on its way, and all leases were given back."""
        return self.leases.is_idle and not self._core.fills.num_open and self._shared.is_idle
