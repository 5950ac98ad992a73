"""Long-lived bidirectional streams: a client that reconnects, and reading at the server.

One stream to a peer carries the messages of many requests; unary calls cost three times as much.
Tests: tests/integration/test_rpc.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvmesh.core.errors import LostError, ProtocolError
from kvmesh.rpc.direct import LOCAL_KEY, OFFER_KEY, DirectClient, wait_for_last_bytes
from kvmesh.rpc.framed import FramedConnection, ignore
from kvmesh.rpc.outbox import Outbox, joined_outbox
from kvmesh.telemetry.logs import event_logger

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

log = event_logger(__name__)

OpenCall = Callable[[AsyncIterator[Any]], Any]
"""A stub's stream-stream method."""

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
"""Seconds to pause between attempts to connect; each pause is twice the one before."""

_REASON_S = 0.5
"""Seconds that the end of a direct connection waits for the end of its call, with the reason."""

UNREACHABLE_AFTER = 8
"""Failed attempts, about five seconds, after which the log reports an unreachable peer."""


async def incoming(requests: AsyncIterator[RequestT]) -> AsyncIterator[RequestT]:
    """Yields the messages of a stream at its server, until the stream or the server ends.

    Raises:
        ProtocolError: the peer sent bytes that are no message of this type.
    """
    # The next read at a stopping server may raise one of grpc's own exceptions.
    with contextlib.suppress(grpc.aio.BaseError):
        try:
            async for request in requests:
                yield request
        except DecodeError as error:
            raise ProtocolError("damaged_message", str(error)) from error


class PeerStream(Generic[RequestT, ResponseT]):
    """Keeps one bidirectional stream to a peer open, reconnecting with backoff and jitter.

    Args:
        name: for logs, for example `scheduler@host:port`.
        open_call: stub method, called with the iterator of requests.
        on_message: called for each message from the peer, on the event loop; must not block. A
            ProtocolError from it ends the connection, as on a direct one.
        on_up: called when a stream is open; may `send` the opening messages.
        on_down: called with a reason when an open stream broke.
        joins: requests have a field `more`, and are joined if several are ready; the peer splits
            them with `parts`.
        direct: accepts the peer's offer of a socket; without it messages stay on gRPC.
    """

    def __init__(
        self,
        name: str,
        open_call: OpenCall,
        on_message: Callable[[ResponseT], None],
        *,
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[str], None] | None = None,
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
        self._outbox: Outbox[RequestT] | None = None
        self._num_failed = 0
        self._up = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether the current stream is open at the peer."""
        return self._up.is_set()

    async def wait_connected(self, timeout_s: float) -> bool:
        """Waits until connected; False after `timeout_s`."""
        # Not `wait_for`: on Python 3.11 it can lose a cancel that arrives in the same iteration.
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
        backoff = FIRST_BACKOFF_S
        while True:
            was_up = await self._run_once()
            backoff = FIRST_BACKOFF_S if was_up else min(backoff * 2, MAX_BACKOFF_S)
            # Jitter, so that a fleet does not reconnect at the same time.
            await asyncio.sleep(backoff * (0.5 + random.random()))

    async def _run_once(self) -> bool:
        outbox: Outbox[RequestT] = Outbox()
        self._outbox = outbox
        requests: Any = outbox
        call = self._open_call(joined_outbox(requests) if self._joins else outbox.__aiter__())
        reason = "closed by peer"
        try:
            # Metadata arrives when the peer's handler has started: only then the stream is open. A
            # failed call also returns, with empty metadata; reading from it then raises the cause.
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
        if self._num_failed == UNREACHABLE_AFTER:  # logged once, not at each attempt
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
        """Waits until the call or its connection ends, and ends the other. Returns the reason."""

        async def read() -> None:
            async for message in call:
                self._on_message(message)

        reading = asyncio.create_task(read())
        try:
            await asyncio.wait((reading, connection.closed), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # A service that refuses its client ends both, and says why on gRPC.
                await asyncio.wait((reading,), timeout=_REASON_S)
                if reading.done():
                    await reading
                return connection.closed.result()
            await wait_for_last_bytes(connection)
            await reading
            return "closed by peer"
        finally:
            connection.on_frame = ignore
            connection.close()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
