"""Questions and answers over one stream, paired by a correlation id.

Tests: tests/integration/test_rpc.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from kvmesh.core.errors import LostError
from kvmesh.rpc.outbox import JoinableT, parts
from kvmesh.rpc.stream import PeerStream

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Correlator(Generic[RequestT, ResponseT]):
    """Sends requests over a `PeerStream` and pairs responses by a correlation id.

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
        """Number of questions without an answer."""
        return len(self._waiting)

    def next_id(self) -> int:
        """Returns a new correlation id."""
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
        # This costs a third of `asyncio.timeout`, for each request and service.
        late = LostError(f"{stream.name} did not answer within {timeout_s} s")
        timer = loop.call_later(timeout_s, _fail, future, late)
        try:
            stream.send(message)
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(correlation_id, None)

    def receive(self, message: ResponseT) -> None:
        """Passes an answer to the call of `ask` that waits for it. Other answers are dropped."""
        future = self._waiting.get(self._get_id(message))
        if future is not None and not future.done():
            future.set_result(message)

    def receive_joined(self, message: JoinableT) -> None:
        """Passes on all answers of a message, which may hold several."""
        for part in parts(message):
            self.receive(cast("ResponseT", part))

    def fail_all(self, reason: str) -> None:
        """Ends all open questions with LostError."""
        for future in self._waiting.values():
            _fail(future, LostError(reason))


def _fail(future: asyncio.Future[Any], error: LostError) -> None:
    if not future.done():
        future.set_exception(error)
