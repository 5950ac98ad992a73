"""Long-lived bidirectional streams: the client end that reconnects, and both ends' outboxes.

One stream to a peer carries the messages of many requests; unary calls cost three times as much.
Tests: tests/integration/test_rpc.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.rpc.direct import LOCAL_KEY, OFFER_KEY, DirectClient, wait_for_last_bytes
from kvmesh.rpc.framed import FramedConnection, ignore
from kvmesh.telemetry.logs import event_logger

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ItemT = TypeVar("ItemT")


class Joinable(Protocol):
    """A message with a field `more`, repeated and of its own type."""

    @property
    def more(self) -> Any:
        """Messages that were ready at the same time."""
        ...

    def ByteSize(self) -> int:
        """Length on the wire."""
        ...


MessageT = TypeVar("MessageT", bound=Joinable)
JoinableT = TypeVar("JoinableT", bound=Joinable)

log = event_logger(__name__)

OpenCall = Callable[[AsyncIterator[Any]], Any]
"""A stub's stream-stream method."""


class Outbox(Generic[ItemT]):
    """Messages waiting to go out on one stream; iterate it, or its `batches`, to send them.

    It is bounded by its users' own limits (slots, requests in flight), not by blocking `put`,
    because a put happens where nothing may wait.
    """

    def __init__(self) -> None:
        self._items: list[ItemT] = []
        self._wake = asyncio.Event()
        self._closed = False
        self._take: Callable[[list[ItemT]], None] | None = None
        self._at_once = False
        self._is_crowded = False
        self._is_due = False
        self._held = False

    def put(self, item: ItemT) -> None:
        """Queues a message; dropped when the stream is closed."""
        if self._closed:
            return
        self._items.append(item)
        if self._take is None:
            self._wake.set()
        elif not self._is_due:
            if self._at_once and not self._is_crowded:
                self._flush()
            # At the end of this round of the loop: what is ready together goes out together.
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def divert(self, take: Callable[[list[ItemT]], None], *, at_once: bool = False) -> None:
        """Hands what is queued to `take` from now on; the iteration then only sees the end.

        Args:
            at_once: the first message of a round of the event loop does not wait for others, unless
                there were others of late: joined they cost both ends less.
        """
        self._take, self._at_once = take, at_once
        self._flush()

    def hold(self, held: bool) -> None:
        """Lets diverted messages wait here, or go on."""
        self._held = held
        self._flush()

    def close(self) -> None:
        """Ends the iteration after what is queued."""
        self._held = False
        self._flush()
        self._closed = True
        self._wake.set()

    def _flush(self) -> None:
        if self._take is not None and self._items and not self._held:
            batch, self._items = self._items, []
            self._take(batch)
            # What follows in the round of a message that left at once makes two of them, too.
            self._is_crowded = self._is_due and (len(batch) > 1 or not self._is_crowded)
        self._is_due = False

    async def __aiter__(self) -> AsyncIterator[ItemT]:
        async for batch in self.batches():
            for item in batch:
                yield item

    async def batches(self) -> AsyncIterator[list[ItemT]]:
        """All that is queued, whenever something is: one step's events become one message."""
        while True:
            if self._items:
                batch, self._items = self._items, []
                yield batch
                continue
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()


MAX_JOINED_BYTES = 1024 * 1024
"""Messages that are larger together go out apart; a receiver's limit is far above."""

UNREACHABLE_AFTER = 8
"""Attempts in vain, about five seconds, after which the log says that a peer is not there."""


def joined(batch: list[MessageT]) -> Iterator[MessageT]:
    """The messages of a batch in as few as possible: the first carries the others in `more`.

    A message costs both ends about 60 us, whatever its size; most of what is ready together is
    small. The receiver takes them apart with `parts`.
    """
    if len(batch) == 1:
        yield batch[0]
        return
    first, size = batch[0], batch[0].ByteSize()
    for message in batch[1:]:
        size += message.ByteSize()
        if size > MAX_JOINED_BYTES:
            yield first
            first, size = message, message.ByteSize()
        else:
            first.more.append(message)
    yield first


def parts(message: MessageT) -> Iterator[MessageT]:
    """The messages that came in one, in order."""
    yield message
    yield from message.more


async def incoming(requests: AsyncIterator[RequestT]) -> AsyncIterator[RequestT]:
    """The messages of a stream at its server, until the stream or the server ends.

    Raises:
        ProtocolError: what the peer sent is no message of this type.
    """
    # A server that stops may say so by an exception of grpc's own at the next read.
    with contextlib.suppress(grpc.aio.BaseError):
        try:
            async for request in requests:
                yield request
        except DecodeError as error:
            raise ProtocolError("damaged_message", str(error)) from error


async def joined_outbox(outbox: Outbox[MessageT]) -> AsyncIterator[MessageT]:
    """An outbox's messages, joined where several are ready."""
    async for batch in outbox.batches():
        for message in joined(batch):
            yield message


class PeerStream(Generic[RequestT, ResponseT]):
    """Keeps one bidirectional stream to a peer open, reconnecting with backoff and jitter.

    Args:
        name: for logs, for example `scheduler@host:port`.
        open_call: stub method, called with the iterator of requests.
        on_message: called for each message from the peer, on the event loop; must not block. A
            ProtocolError from it ends the connection, as on a direct one.
        on_up: called when a stream is open; may `send` the opening messages.
        on_down: called with a reason when an open stream broke.
        joins: requests have a field `more` and are joined where several are ready; the peer
            takes them apart with `parts`.
        direct: takes up the peer's offer of a socket; without it messages stay on gRPC.
    """

    def __init__(
        self,
        name: str,
        open_call: OpenCall,
        on_message: Callable[[ResponseT], None],
        *,
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[str], None] | None = None,
        max_backoff_s: float = 1.0,
        joins: bool = False,
        direct: DirectClient | None = None,
    ) -> None:
        self.name = name
        self._joins = joins
        self._direct = direct
        self._open_call = open_call
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._max_backoff_s = max_backoff_s
        self._outbox: Outbox[RequestT] | None = None
        self._num_failed = 0
        self._up = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the peer answered on the current stream's connection."""
        return self._up.is_set()

    async def wait_connected(self, timeout_s: float) -> bool:
        """Waits until connected; False after `timeout_s`."""
        # Not wait_for: on Python 3.11 it can swallow a cancel that comes in the same tick.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        return self.connected

    def send(self, message: RequestT) -> None:
        """Queues a message on the open stream.

        Raises:
            LostError: no stream is open.
        """
        if self._outbox is None or not self.connected:
            raise LostError(f"no connection to {self.name}")
        self._outbox.put(message)

    async def run(self) -> None:
        """Connects and reads until cancelled."""
        backoff = 0.05
        while True:
            was_up = await self._run_once()
            backoff = 0.05 if was_up else min(backoff * 2, self._max_backoff_s)
            # Jitter, so that a fleet does not reconnect in step.
            await asyncio.sleep(backoff * (0.5 + random.random()))

    async def _run_once(self) -> bool:
        outbox: Outbox[RequestT] = Outbox()
        self._outbox = outbox
        requests: Any = outbox
        call = self._open_call(joined_outbox(requests) if self._joins else outbox.__aiter__())
        reason = "closed by peer"
        try:
            # Metadata arrives when the peer's handler has started: only then is it really up.
            # A call that failed answers too, with nothing; reading from it then raises the cause.
            connection = await self._go_direct(await call.initial_metadata(), outbox)
            if not call.done():
                self._up.set()
                if self._on_up is not None:
                    self._on_up()
            if connection is None:
                async for message in call:
                    self._on_message(message)
            else:
                reason = await self._guard(call, connection)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except ProtocolError as error:
            reason = str(error)
        finally:
            was_up = self._up.is_set()
            self._up.clear()
            outbox.close()
            self._outbox = None
            call.cancel()
            if was_up:
                log.info("stream_down", peer=self.name, reason=reason)
                if self._on_down is not None:
                    self._on_down(reason)
            self._count(was_up, reason)
        return was_up

    def _count(self, was_up: bool, reason: str) -> None:
        self._num_failed = 0 if was_up else self._num_failed + 1
        if self._num_failed == UNREACHABLE_AFTER:  # said once, not at each attempt
            log.warning("peer_unreachable", peer=self.name, reason=reason)

    async def _go_direct(self, metadata: Any, outbox: Outbox[Any]) -> FramedConnection | None:
        offer = metadata.get(OFFER_KEY) if metadata else None
        if self._direct is None or offer is None:
            return None
        local_name = str(metadata.get(LOCAL_KEY) or "")
        connection = await self._direct.connect(str(offer), self._on_message, local_name)
        if connection is not None:
            connection.on_hold = outbox.hold
            outbox.divert(connection.send, at_once=True)
        return connection

    async def _guard(self, call: Any, connection: FramedConnection) -> str:
        """Waits until the call or its connection ends, and ends the other; returns why."""

        async def read() -> None:
            async for message in call:
                self._on_message(message)

        reading = asyncio.create_task(read())
        try:
            await asyncio.wait((reading, connection.closed), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return connection.closed.result()
            await wait_for_last_bytes(connection)
            await reading
            return "closed by peer"
        finally:
            connection.on_frame = ignore
            connection.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class Correlator(Generic[RequestT, ResponseT]):
    """Questions and answers over a `PeerStream`, paired by a correlation id.

    Pass `receive` as the stream's `on_message` and `fail_all` as its `on_down`.

    Args:
        get_id: reads the correlation id of an answer.
    """

    def __init__(self, get_id: Callable[[ResponseT], int]) -> None:
        self._get_id = get_id
        self._next_id = 1
        self._waiting: dict[int, asyncio.Future[ResponseT]] = {}

    @property
    def num_waiting(self) -> int:
        """Questions without an answer."""
        return len(self._waiting)

    def next_id(self) -> int:
        """A fresh correlation id."""
        self._next_id += 1
        return self._next_id

    async def ask(
        self,
        stream: PeerStream[RequestT, ResponseT],
        correlation_id: int,
        message: RequestT,
        timeout_s: float,
    ) -> ResponseT:
        """Sends a question and waits for its answer.

        Raises:
            LostError: no connection, the connection broke, or no answer within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResponseT] = loop.create_future()
        self._waiting[correlation_id] = future
        # A third of the cost of `asyncio.timeout`, once per request and service.
        late = LostError(f"{stream.name} did not answer within {timeout_s} s")
        timer = loop.call_later(timeout_s, _fail, future, late)
        try:
            stream.send(message)
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(correlation_id, None)

    def receive(self, message: ResponseT) -> None:
        """Hands an answer to whoever asked; answers nobody waits for are dropped."""
        future = self._waiting.get(self._get_id(message))
        if future is not None and not future.done():
            future.set_result(message)

    def receive_joined(self, message: JoinableT) -> None:
        """Hands over all answers of a message that may hold several."""
        for part in parts(message):
            self.receive(cast("ResponseT", part))

    def fail_all(self, reason: str) -> None:
        """Ends all open questions with LostError."""
        for future in self._waiting.values():
            _fail(future, LostError(reason))


def _fail(future: asyncio.Future[Any], error: LostError) -> None:
    if not future.done():
        future.set_exception(error)
