"""The kvmanager: construction, the gRPC servicer and the background sweep.

Tests: tests/integration/test_kvmanager.py.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

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
from kvmesh.rpc.served import DirectWay, serve_questions
from kvmesh.rpc.stream import incoming
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
from services.kvmanager.session import PublisherSession, check_hashes, publisher_from_hello
from services.kvmanager.watch import PrefixWatch

log = event_logger(__name__)

_MessageT = TypeVar("_MessageT")

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
        self._sessions: set[PublisherSession] = set()
        self._direct: DirectWay[pb.MatchPrefixResponse] = DirectWay(
            direct, pb.MatchPrefixRequest, iter, at_once=True
        )

    async def Publish(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[pb.PublishResponse]:
        await context.send_initial_metadata(())
        outbox: Outbox[pb.PublishResponse] = Outbox()
        async with _reading(self._follow(request_iterator, outbox), outbox, context):
            async for message in outbox:
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
        await context.send_initial_metadata(())
        try:
            first = await anext(incoming(request_iterator), None)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if first is None:
            return
        if first.WhichOneof("message") != "start":
            text = "the first message of a WatchPrefixes stream must be a start"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        reader = asyncio.create_task(self._note_reads(request_iterator))
        metrics.WATCHERS.inc()
        try:
            told = PrefixWatch(self.guard).told(first.start.position)
            async for message in _until_broken(told, reader):
                yield message
        except StoreUnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            metrics.WATCHERS.dec()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _note_reads(self, requests: Any) -> None:
        async for message in incoming(requests):
            if message.WhichOneof("message") != "reads":
                raise ProtocolError(
                    "watch_order", "after its start, a watcher may only report reads"
                )
            for read in message.reads.reads:
                check_hashes(read.block_hashes)
                blocks = len(read.block_hashes) // BLOCK_HASH_BYTES
                self.pool.heat.note(read.namespace, read.block_hashes, blocks)

    async def _follow(self, requests: Any, outbox: Outbox[pb.PublishResponse]) -> None:
        session: PublisherSession | None = None
        seat: PoolSeat | None = None
        try:
            async for message in incoming(requests):
                if session is not None and seat is not None:
                    if not seat.handle(message):
                        await session.handle(message)
                    continue
                publisher = publisher_from_hello(message)
                session = PublisherSession(publisher, self.guard, outbox, self._writes)
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


@asynccontextmanager
async def _reading(reader: Any, outbox: Outbox[Any], context: Any) -> AsyncIterator[None]:
    """Runs a stream's reader beside its writer. The end of the reader closes the outbox.

    A peer that breaks the contract gets INVALID_ARGUMENT.
    """
    task = asyncio.ensure_future(reader)
    task.add_done_callback(lambda _: outbox.close())
    try:
        yield
        await task
    except ProtocolError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until_broken(
    messages: AsyncIterator[_MessageT], reader: asyncio.Task[None]
) -> AsyncIterator[_MessageT]:
    """Yields one direction's messages until the other direction's reader fails with an error."""
    while True:
        if reader.done():  # it may have failed while the last message was sent
            reader.result()
        following = asyncio.ensure_future(anext(messages, None))
        try:
            await asyncio.wait(
                {following} if reader.done() else {following, reader},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if reader.done():
                reader.result()
            message = await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if message is None:
            return
        yield message


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
    context.spawn(sweep_forever(servicer.guard, config.index), "store-sweep")
    context.spawn(servicer.pool.run(), "pool")
    context.show("/debug/segments", servicer.pool.shown)
