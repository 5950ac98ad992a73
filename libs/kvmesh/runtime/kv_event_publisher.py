"""Publishes a worker's KV events over ZMQ, as vLLM does: PUB for all, ROUTER for what was missed.

A message is (topic, sequence number as 8 bytes big-endian, batch). A subscriber that misses numbers
sends the first one that it wants to the replay socket and gets batches from there on, then an empty
one with the number -1. Nothing here waits for subscribers: who is too slow loses messages, sees the
gap and asks. Tests: tests/integration/test_kv_events.py.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from kvmesh.core.errors import ConfigError
from kvmesh.kv.events import KvEvent
from kvmesh.runtime.kv_event_wire import WireFormat
from kvmesh.runtime.worker_config import EventsSection
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

FLUSH_DELAY_S = 0.005
"""How long the first event waits for others to share its batch."""

HIGH_WATER_MARK = 100_000
"""Messages that wait for one slow subscriber; vLLM's number."""

MAX_REQUEST_BYTES = 1024
"""Longest message that is taken: a topic, or a number. Who sends more is cut."""

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Both sockets and the last batches.

    Args:
        take_events: returns and forgets the events so far.

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(
        self,
        config: EventsSection,
        wire: WireFormat,
        take_events: Callable[[], Sequence[KvEvent]],
    ) -> None:
        self._topic = config.topic.encode()
        self._wire = wire
        self._take_events = take_events
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_batches)
        self._sequence = 0
        self._wake = asyncio.Event()
        self._context = zmq.asyncio.Context()
        # Not an asyncio socket: sending never waits, so that order is kept and no task is needed.
        self._pub = zmq.Socket(self._context, zmq.PUB)
        self._pub.set_hwm(HIGH_WATER_MARK)
        # Without it anybody could have a message of any size received.
        self._pub.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._replay: zmq.asyncio.Socket | None = None
        self.replay_endpoint = ""
        try:
            self.endpoint = _attach(self._pub, config.endpoint, "events.endpoint")
            if config.replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
                self.replay_endpoint = _attach(
                    self._replay, config.replay_endpoint, "events.replay_endpoint"
                )
        except ConfigError:
            self.close()
            raise
        log.info("kv_events_serving", endpoint=self.endpoint, replay_endpoint=self.replay_endpoint)

    @property
    def num_batches(self) -> int:
        """Batches published so far: the next one's number."""
        return self._sequence

    def notify(self) -> None:
        """Says that there are events; they are published within some milliseconds."""
        self._wake.set()

    async def run(self) -> None:
        """Publishes and answers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(), name="kv-events-publish")
            if self._replay is not None:
                tasks.create_task(self._answer(self._replay), name="kv-events-replay")

    def close(self) -> None:
        """Closes the sockets; what nobody has read is dropped. May be called again."""
        for socket in (self._pub, self._replay):
            if socket is not None:
                socket.close(linger=0)
        self._context.term()

    async def _publish(self) -> None:
        while True:
            self.flush()
            await self._wake.wait()
            await asyncio.sleep(FLUSH_DELAY_S)
            self._wake.clear()

    def flush(self) -> None:
        """Publishes what has happened, as one batch; nothing without events."""
        events = self._take_events()
        if not events:
            return
        payload = self._wire.encode(events, time.time())
        number = self._sequence
        self._sequence += 1
        self._kept.append((number, payload))
        # A PUB socket drops for who is too slow and never blocks.
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def _answer(self, replay: zmq.asyncio.Socket) -> None:
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("bad_replay_request", num_frames=len(frames))
                continue
            client, _, first = frames
            wanted = int.from_bytes(first, "big")
            for number, payload in tuple(self._kept):
                if number >= wanted:
                    await replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload))
            await replay.send_multipart((client, b"", END_SEQUENCE, b""))


def _attach(socket: zmq.Socket[Any], endpoint: str, option: str) -> str:
    """Binds to what has a wildcard or begins with `@`; connects to any other, as vLLM does.

    Returns:
        The endpoint with the port that was chosen.
    """
    address = endpoint.removeprefix("@")
    wild = any(mark in address for mark in ("*", "::", "ipc://", "inproc://", "127.0.0.1:0"))
    # Who is asked must be there: only a socket that publishes may go to its subscribers.
    binds = wild or address != endpoint or socket.type == zmq.ROUTER
    try:
        if not binds:
            socket.connect(address)
            return address
        socket.bind(address.replace("127.0.0.1:0", "127.0.0.1:*"))
    except zmq.ZMQError as error:
        raise ConfigError(f"{option} {endpoint}: {error.strerror}") from error
    return str(socket.get_string(zmq.LAST_ENDPOINT))
