"""The kvmanager: construction, the gRPC servicer and the background sweep.

Tests: tests/integration/test_kvmanager.py.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvmesh.core.clock import SystemClock
from kvmesh.core.errors import ConfigError, ProtocolError
from kvmesh.core.types import BLOCK_HASH_BYTES
from kvmesh.metadata.memory_store import MemoryMetadataStore
from kvmesh.metadata.pool_store import MemoryPoolStore, PoolStore, RedisPoolStore
from kvmesh.metadata.redis_client import RedisClient
from kvmesh.metadata.redis_store import RedisMetadataStore
from kvmesh.metadata.store import MetadataStore, StoreUnavailableError
from kvmesh.rpc.direct import DirectListener
from kvmesh.rpc.outbox import Outbox
from kvmesh.rpc.served import DirectWay, serve_in_order, serve_questions
from kvmesh.runtime.app import ServiceContext
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import kv_manager_service_pb2 as pb
from kvmesh.v1 import kv_manager_service_pb2_grpc as pb_grpc
from services.kvmanager import metrics
from services.kvmanager.config import IndexConfig, KvManagerConfig
from services.kvmanager.guard import StoreGuard
from services.kvmanager.lookup import PrefixLookups
from services.kvmanager.pool import Pool
from services.kvmanager.pool_seat import PoolSeat
from services.kvmanager.renewals import Renewals
from services.kvmanager.session import PublisherSession, check_hashes, publisher_from_hello
from services.kvmanager.watch import PrefixWatch

log = event_logger(__name__)

MAX_WRITES = 8
"""Maximum number of sessions that change the store at once. More would only delay lookups."""


class KvManagerServicer(pb_grpc.KvManagerServiceServicer):
    """Serves workers (Publish) and schedulers (WatchPrefixes, MatchPrefix)."""

    def __init__(
        self,
        config: KvManagerConfig,
        store: MetadataStore,
        pool_store: PoolStore,
        direct: DirectListener,
    ) -> None:
        self.guard = StoreGuard(store, config.limits.probe_interval_s, self._store_recovered)
        self.pool = Pool(config.pool, pool_store, self.guard, SystemClock(), uuid.uuid4().hex)
        self._lookups = PrefixLookups(self.guard, config.limits, self.pool.heat.note)
        self._writes = asyncio.Semaphore(MAX_WRITES)
        self.renewals = Renewals(self.guard, self._writes)
        self._sessions: set[PublisherSession] = set()
        self._direct: DirectWay[pb.MatchPrefixResponse] = DirectWay(
            direct, pb.MatchPrefixRequest, iter, at_once=True
        )
        self._publish_way: DirectWay[pb.PublishResponse] = DirectWay(
            direct, pb.PublishRequest, iter
        )
        self._watch_way: DirectWay[pb.WatchPrefixesResponse] = DirectWay(
            direct, pb.WatchPrefixesRequest, iter
        )

    async def Publish(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.PublishResponse]:
        async for message in serve_in_order(
            request_iterator, context, self._follow, self._publish_way
        ):
            yield message

    async def MatchPrefix(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.MatchPrefixResponse]:
        async for answer in serve_questions(
            request_iterator, context, self._answer, _nothing_open, self._direct
        ):
            yield answer

    async def WatchPrefixes(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.WatchPrefixesResponse]:
        metrics.WATCHERS.inc()
        try:
            async for message in serve_in_order(
                request_iterator, context, self._watch, self._watch_way
            ):
                yield message
        except StoreUnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            metrics.WATCHERS.dec()

    async def _watch(
        self,
        messages: AsyncIterator[pb.WatchPrefixesRequest],
        outbox: Outbox[pb.WatchPrefixesResponse],
    ) -> None:
        first = await anext(messages, None)
        if first is None:
            return
        if first.WhichOneof("message") != "start":
            text = "the first message of a WatchPrefixes stream must be a start"
            raise ProtocolError("watch_order", text)
        telling = asyncio.create_task(self._tell(first.start.position, outbox))
        reading = asyncio.create_task(self._note_reads(messages))
        try:
            await asyncio.wait({telling, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            await telling
        finally:
            telling.cancel()
            reading.cancel()
            await asyncio.gather(telling, reading, return_exceptions=True)

    async def _tell(self, position: str, outbox: Outbox[pb.WatchPrefixesResponse]) -> None:
        async for message in PrefixWatch(self.guard).told(position):
            outbox.put(message)
            await outbox.emptied()

    async def _note_reads(self, messages: AsyncIterator[pb.WatchPrefixesRequest]) -> None:
        async for message in messages:
            if message.WhichOneof("message") != "reads":
                raise ProtocolError(
                    "watch_order", "after its start, a watcher may only report reads"
                )
            for read in message.reads.reads:
                check_hashes(read.block_hashes)
                blocks = len(read.block_hashes) // BLOCK_HASH_BYTES
                self.pool.heat.note(read.namespace, read.block_hashes, blocks)

    async def _follow(
        self, messages: AsyncIterator[pb.PublishRequest], outbox: Outbox[pb.PublishResponse]
    ) -> None:
        session: PublisherSession | None = None
        seat: PoolSeat | None = None
        try:
            async for message in messages:
                if session is not None and seat is not None:
                    if not seat.handle(message):
                        await session.handle(message)
                    continue
                publisher = publisher_from_hello(message)
                session = PublisherSession(
                    publisher, self.guard, outbox, self._writes, self.renewals
                )
                self._sessions.add(session)
                seat = PoolSeat(publisher, outbox)
                self.pool.join(seat)
                metrics.STREAMS.set(len(self._sessions))
                log.info(
                    "publisher_connected",
                    worker_id=publisher.worker_id,
                    incarnation=publisher.incarnation,
                    namespace=publisher.namespace,
                )
                await session.open()
        finally:
            # The worker's lease continues: the worker may reconnect before it ends.
            if seat is not None:
                self.pool.leave(seat)
            if session is not None:
                self._sessions.discard(session)
                metrics.STREAMS.set(len(self._sessions))

    async def _answer(
        self, request: pb.MatchPrefixRequest, outbox: Outbox[pb.MatchPrefixResponse]
    ) -> None:
        check_hashes(request.block_hashes)
        outbox.put(await self._lookups.answer(request))

    async def _store_recovered(self) -> None:
        await asyncio.gather(*(session.store_recovered() for session in tuple(self._sessions)))


def _nothing_open(_outbox: Outbox[pb.MatchPrefixResponse]) -> None:
    """Called when a stream of lookups ends: they leave no state to clean up."""


async def sweep_forever(guard: StoreGuard, config: IndexConfig) -> None:
    """Removes entries of dead workers and updates the counts, until cancelled."""
    while True:
        try:
            swept = await guard.call(lambda store: store.sweep(config.sweep_max_blocks))
            statistics = await guard.call(lambda store: store.statistics())
        except StoreUnavailableError:
            pass  # the guard reports it, and a later sweep loses nothing
        else:
            metrics.SWEPT.inc(swept)
            metrics.PUBLISHERS.set(statistics.num_publishers)
            metrics.BLOCKS.set(statistics.num_blocks)
        await asyncio.sleep(config.sweep_interval_s)


def open_stores(config: KvManagerConfig) -> tuple[MetadataStore, PoolStore]:
    """Makes the configured stores, without connecting. Closing the first closes both.

    Raises:
        ConfigError: an unknown kind of store, or a bad URL.
    """
    if config.index.store == "memory":
        clock = SystemClock()
        return MemoryMetadataStore(clock, config.index.lease_s), MemoryPoolStore(clock)
    if config.index.store == "redis":
        client = RedisClient(config.redis)
        return RedisMetadataStore(client, config.index.lease_s), RedisPoolStore(client)
    raise ConfigError(f"index.store must be redis or memory, not {config.index.store!r}")


async def build(config: KvManagerConfig, context: ServiceContext) -> None:
    """Constructs the service."""
    store, pool_store = open_stores(config)
    context.stack.push_async_callback(store.close)
    await context.direct.start()
    servicer = KvManagerServicer(config, store, pool_store, context.direct)
    await servicer.guard.start()
    context.add_servicer(pb_grpc.add_KvManagerServiceServicer_to_server, servicer)
    context.spawn(servicer.guard.run(), "store-guard")
    context.spawn(servicer.renewals.run(), "renewals")
    context.spawn(sweep_forever(servicer.guard, config.index), "store-sweep")
    context.spawn(servicer.pool.run(), "pool")
    context.show("/debug/segments", servicer.pool.shown)
