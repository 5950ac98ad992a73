"""Queue of outgoing messages of one stream, joined into few messages if several are ready.

Tests: tests/unit/rpc/test_outbox.py, tests/integration/test_rpc.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

ItemT = TypeVar("ItemT")


class Joinable(Protocol):
    """A message with a field `more`, repeated and of its own type."""

    @property
    def more(self) -> Any:
        """The other messages that were ready at the same time."""
        ...

    def ByteSize(self) -> int:
        """Length in bytes when serialised."""
        ...


MessageT = TypeVar("MessageT", bound=Joinable)
JoinableT = TypeVar("JoinableT", bound=Joinable)

MAX_JOINED_BYTES = 1024 * 1024
"""Maximum bytes of a joined message; a receiver's limit is far above."""


class Outbox(Generic[ItemT]):
    """Messages that wait to be sent on one stream; iterate it, or its `batches`, to send them.

    Its users' own limits (slots, requests in flight) bound it. `put` does not block, because it is
    called where waiting is not possible.
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
        self._emptied = asyncio.Event()

    def put(self, item: ItemT) -> None:
        """Queues a message. Drops it if the stream is closed."""
        if self._closed:
            return
        self._items.append(item)
        if self._take is None:
            self._wake.set()
        elif not self._is_due:
            if self._at_once and not self._is_crowded:
                self._flush()
            # Sends at the end of this event-loop iteration, so that messages ready together go
            # together.
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def divert(self, take: Callable[[list[ItemT]], None], *, at_once: bool = False) -> None:
        """Passes messages to `take` from now on. The iteration then only gets the end.

        Args:
            at_once: the first message of an event-loop iteration does not wait for others, unless
                recent iterations had several: joined messages cost both sides less.
        """
        self._take, self._at_once = take, at_once
        self._flush()

    def hold(self, held: bool) -> None:
        """Holds diverted messages back, or continues."""
        self._held = held
        self._flush()

    def close(self) -> None:
        """Ends the iteration after the queued messages."""
        self._held = False
        self._flush()
        self._closed = True
        self._wake.set()
        self._emptied.set()

    async def emptied(self) -> None:
        """Waits until all messages were taken, or the stream is closed."""
        while self._items and not self._closed:
            self._emptied.clear()
            await self._emptied.wait()

    def _batch(self) -> list[ItemT]:
        batch, self._items = self._items, []
        self._emptied.set()
        return batch

    def _flush(self) -> None:
        if self._take is not None and self._items and not self._held:
            batch = self._batch()
            self._take(batch)
            # A message that follows one sent at once in the same iteration makes two of them, too.
            self._is_crowded = self._is_due and (len(batch) > 1 or not self._is_crowded)
        self._is_due = False

    async def __aiter__(self) -> AsyncIterator[ItemT]:
        async for batch in self.batches():
            for item in batch:
                yield item

    async def batches(self) -> AsyncIterator[list[ItemT]]:
        """Yields all queued messages at once: the events of one step become one message."""
        while True:
            if self._items:
                yield self._batch()
                continue
            if self._closed:
                return
            self._wake.clear()
            await self._wake.wait()


def joined(batch: list[MessageT]) -> Iterator[MessageT]:
    """Joins a batch into as few messages as possible: the first carries the others in `more`.

    A message costs both sides about 60 us, whatever its size, and most messages that are ready
    together are small. The receiver splits them with `parts`.
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
    """The messages of a joined message, in order."""
    yield message
    yield from message.more


async def joined_outbox(outbox: Outbox[MessageT]) -> AsyncIterator[MessageT]:
    """Yields an outbox's messages, joined if several are ready."""
    async for batch in outbox.batches():
        for message in joined(batch):
            yield message
