"""The server side of long-lived streams, over gRPC or over a separate socket.

Tests: tests/integration/test_rpc_direct.py, tests/integration/test_worker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic

import grpc
from google.protobuf.message import Message

from kvmesh.core.errors import ProtocolError
from kvmesh.rpc.direct import DirectListener, DirectOffer
from kvmesh.rpc.framed import FramedConnection
from kvmesh.rpc.inbox import Inbox
from kvmesh.rpc.outbox import ItemT, JoinableT, MessageT, Outbox, joined, parts
from kvmesh.rpc.stream import RequestT, incoming


@dataclass(frozen=True, slots=True)
class DirectWay(Generic[ItemT]):
    """Moves a served stream to a separate socket.

    Attributes:
        request_type: class of the client's messages.
        messages: makes the outgoing messages of an outbox's batch.
        at_once: the client waits for each single message, so `Outbox.divert` sends it at once.
    """

    listener: DirectListener
    request_type: type[Message]
    messages: Callable[[list[ItemT]], Iterable[Message]]
    at_once: bool = False

    def offer(
        self, receive: Callable[[Any, Outbox[ItemT]], None], outbox: Outbox[ItemT]
    ) -> DirectOffer:
        """Offers the stream's client a connection."""
        parse = self.request_type.FromString

        def connected(connection: FramedConnection) -> None:
            connection.on_hold = outbox.hold
            connection.closed.add_done_callback(lambda _: outbox.close())
            send = connection.send
            outbox.divert(lambda batch: send(self.messages(batch)), at_once=self.at_once)

        return self.listener.offer(lambda frame: receive(parse(frame), outbox), connected)


async def serve_stream(
    requests: AsyncIterator[JoinableT],
    context: grpc.aio.ServicerContext[Any, Any],
    receive: Callable[[JoinableT, Outbox[ItemT]], None],
    on_end: Callable[[Outbox[ItemT]], None],
    direct: DirectWay[ItemT] | None = None,
) -> AsyncIterator[list[ItemT]]:
    """Serves a long-lived stream: yields the items that `receive` puts into the outbox.

    Args:
        receive: called for each message, on the event loop; must not block.
        on_end: called once, however the stream ends; releases everything that belongs to it.
        direct: offered to the client; messages on that socket are not yielded.
    """
    outbox: Outbox[ItemT] = Outbox()
    offer = None if direct is None else direct.offer(receive, outbox)

    async def read() -> None:
        try:
            async for request in incoming(requests):
                for part in parts(request):
                    receive(part, outbox)
        finally:
            outbox.close()

    reader: asyncio.Task[None] | None = None
    try:
        # Now, not with the first answer: the client counts as connected when this arrives.
        await context.send_initial_metadata(() if offer is None else offer.metadata)
        reader = asyncio.create_task(read())
        async for events in outbox.batches():
            yield events
        if offer is not None and offer.failure is not None:
            raise offer.failure
        if reader.done():  # else another part closed the outbox
            await reader  # an error in `receive` breaks the stream and is not hidden
    except ProtocolError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    finally:
        if offer is not None:
            offer.withdraw()
        if reader is not None:
            reader.cancel()
        on_end(outbox)


async def serve_in_order(
    requests: AsyncIterator[RequestT],
    context: grpc.aio.ServicerContext[Any, Any],
    follow: Callable[[AsyncIterator[RequestT], Outbox[ItemT]], Coroutine[Any, Any, None]],
    direct: DirectWay[ItemT],
) -> AsyncIterator[ItemT]:
    """Serves a stream whose messages are handled one after the other.

    Args:
        follow: handles the messages and fills the outbox; its end is the end of the stream, and its
            ProtocolError is the client's fault.
        direct: offered to the client; messages on that socket are not yielded.
    """
    inbox: Inbox[RequestT] = Inbox()
    outbox: Outbox[ItemT] = Outbox()
    offer = direct.offer(lambda message, _: inbox.put(message), outbox)
    inbox.on_hold = offer.hold_reading

    async def read() -> None:
        try:
            async for request in incoming(requests):
                inbox.put(request)
                await inbox.room()
        except ProtocolError as error:
            inbox.close(error)
        else:
            inbox.close()

    async def run() -> None:
        try:
            await follow(aiter(inbox), outbox)
        finally:
            outbox.close()

    tasks: list[asyncio.Task[None]] = []
    try:
        await context.send_initial_metadata(offer.metadata)
        tasks = [asyncio.create_task(read()), asyncio.create_task(run())]
        async for item in outbox:
            yield item
        if offer.failure is not None:
            raise offer.failure
        for task in tasks:
            if task.done():
                await task
    except ProtocolError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    finally:
        offer.withdraw()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve_questions(
    questions: AsyncIterator[JoinableT],
    context: grpc.aio.ServicerContext[Any, Any],
    answer: Callable[[JoinableT, Outbox[MessageT]], Coroutine[Any, Any, None]],
    on_end: Callable[[Outbox[MessageT]], None],
    direct: DirectWay[MessageT] | None = None,
) -> AsyncIterator[MessageT]:
    """Serves the questions of a `Correlator`: one task per question, cancelled with the stream.

    Args:
        answer: puts its answer into the outbox; raises ProtocolError for an invalid question.
        on_end: called once, however the stream ends.
        direct: offered to the client; messages on that socket are not yielded.
    """
    running: set[asyncio.Task[None]] = set()
    failed: list[BaseException] = []
    loop = asyncio.get_running_loop()

    def receive(question: JoinableT, outbox: Outbox[MessageT]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            running.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:  # it breaks the stream and is not hidden
                failed.append(error)
                outbox.close()

        task = loop.create_task(answer(question, outbox))
        running.add(task)
        task.add_done_callback(done)

    def end(outbox: Outbox[MessageT]) -> None:
        for task in running:
            task.cancel()
        on_end(outbox)

    async for batch in serve_stream(questions, context, receive, end, direct):
        for message in joined(batch):
            yield message
    if failed:
        if isinstance(failed[0], ProtocolError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(failed[0]))
        raise failed[0]
