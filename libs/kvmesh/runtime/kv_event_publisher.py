"""Publishes a worker's KV events over ZMQ as vLLM does: PUB for all, ROUTER for missed batches.

A message is (topic, sequence number as 8 bytes big-endian, batch). A subscriber that misses numbers
sends the first missing number to the replay socket. It gets the batches from there on, then an
empty one with the number -1. vLLM puts the topic into these messages too since 0.26, and encodes
events as maps since 0.28; here the two go together. The publisher never waits for subscribers: a
slow subscriber loses messages, notices the gap and asks.
Tests: tests/integration/test_kv_events.py.
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
"""Seconds that the first event waits for others to share its batch."""

HIGH_WATER_MARK = 100_000
"""Maximum number of messages queued for one slow subscriber; vLLM's number."""

MAX_REQUEST_BYTES = 1024
"""Maximum bytes of a received message, which is a topic or a number.

Longer ones cut the connection.
"""

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Both sockets and the last batches.

    Args:
        take_events: returns the events so far and forgets them.

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
        # Not an asyncio socket: sending never waits, so the order is kept without a task.
        self._pub = zmq.Socket(self._context, zmq.PUB)
        self._pub.set_hwm(HIGH_WATER_MARK)
        # Without this limit, anybody could send a message of any size.
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
        """Number of batches published so far; the number of the next one."""
        return self._sequence

    def notify(self) -> None:
        """Notes that there are events, which are published within some milliseconds."""
        self._wake.set()

    async def run(self) -> None:
        """Publishes and answers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(), name="kv-events-publish")
            if self._replay is not None:
                tasks.create_task(self._answer(self._replay), name="kv-events-replay")

    def close(self) -> None:
        """Closes the sockets; unread messages are dropped. May be called again."""
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
        """Publishes all events so far as one batch; nothing without events."""
        events = self._take_events()
        if not events:
            return
        payload = self._wire.encode(events, time.time())
        number = self._sequence
        self._sequence += 1
        self._kept.append((number, payload))
        # A PUB socket never blocks: it drops messages for slow subscribers.
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload), zmq.NOBLOCK)

    async def _answer(self, replay: zmq.asyncio.Socket) -> None:
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("bad_replay_request", num_frames=len(frames))
                continue
            client, _, first = frames
            wanted = int.from_bytes(first, "big")
            topic, no_topic = ([self._topic], [b""]) if self._wire.as_map else ([], [])
            for number, payload in tuple(self._kept):
                if number >= wanted:
                    again = (client, b"", *topic, number.to_bytes(8, "big"), payload)
                    await replay.send_multipart(again)
            await replay.send_multipart((client, b"", *no_topic, END_SEQUENCE, b""))


def _attach(socket: zmq.Socket[Any], endpoint: str, option: str) -> str:
    """Binds to an address with a wildcard or a leading `@`; connects to any other, as vLLM does.

    Returns:
        The endpoint with the chosen port.
    """
    address = endpoint.removeprefix("@")
    wild = any(mark in address for mark in ("*", "::", "ipc://", "inproc://", "127.0.0.1:0"))
    # Only a publishing socket may connect to its subscribers; the replay socket must be bound.
    binds = wild or address != endpoint or socket.type == zmq.ROUTER
    try:
        if not binds:
            socket.connect(address)
            return address
        socket.bind(address.replace("127.0.0.1:0", "127.0.0.1:*"))
    except zmq.ZMQError as error:
        raise ConfigError(f"{option} {endpoint}: {error.strerror}") from error
    return str(socket.get_string(zmq.LAST_ENDPOINT))
