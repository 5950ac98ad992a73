"""Joins a connection's writes of one event-loop iteration into one system call, which costs 10 us.

While the gateway keeps up, an iteration brings one token of a stream. When it is behind, an
iteration brings several tokens, and they leave together.
Tests: tests/unit/gateway/fronts/test_joined_writer.py.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Transport(Protocol):
    """The methods of a transport that a writer uses."""

    def write(self, data: bytes) -> None:
        """Sends or buffers."""
        ...

    def is_closing(self) -> bool:
        """Whether the transport is closing, so that writing has no effect."""
        ...

    def get_write_buffer_size(self) -> int:
        """Number of bytes that are not sent yet."""
        ...


class Turn:
    """The writers with bytes to send at the end of this event-loop iteration."""

    def __init__(self) -> None:
        self._holding: list[JoinedWriter] = []

    def add(self, writer: JoinedWriter) -> None:
        """Registers a writer, which sends after the iteration's events were handled."""
        if not self._holding:
            asyncio.get_running_loop().call_soon(self._end)
        self._holding.append(writer)

    def _end(self) -> None:
        holding, self._holding = self._holding, []
        for writer in holding:
            writer.send()


class JoinedWriter:
    """Writes to one connection; nothing else may write to its transport."""

    def __init__(self, transport: Transport, turn: Turn) -> None:
        self._transport = transport
        self._turn = turn
        self._held: list[bytes] = []
        self.is_closing = transport.is_closing
        self.get_write_buffer_size = transport.get_write_buffer_size

    def write(self, data: bytes) -> None:
        """Sends at the end of this event-loop iteration."""
        if not self._held:
            self._turn.add(self)
        self._held.append(data)

    def write_now(self, data: bytes) -> None:
        """Sends at once, after the bytes held."""
        self._held.append(data)
        self.send()

    def send(self) -> None:
        """Sends the bytes held."""
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held = []
            if not self._transport.is_closing():
                self._transport.write(data)
