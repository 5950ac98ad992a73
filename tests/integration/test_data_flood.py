"""Floods of a worker's data port by who says nothing: peers that are known go on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from typing import Any

import pytest

from kvmesh.core.newcomers import Newcomers
from kvmesh.transfer import data_server
from kvmesh.transfer.channel_pool import SendOptions
from kvmesh.transfer.data_server import ReceiveOptions
from tests.transfer_pair import Pair, running_pair, whole
from tests.waiting import until

LONG_S = 60.0
"""Nobody is cut for being slow within a test."""


def _pair() -> Any:
    return running_pair(
        SendOptions(kinds=("tcp",), lanes=2, stall_timeout_s=LONG_S),
        ReceiveOptions(stall_timeout_s=LONG_S),
    )


async def _silent(pair: Pair) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    endpoint = pair.reservation.data_endpoint
    return await asyncio.open_connection(endpoint.host, endpoint.port)


async def test_of_too_many_silent_ones_the_oldest_is_cut_and_writers_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvmesh.transfer.data_server")
    async with _pair() as pair:
        await pair.pool.put(pair.reservation, whole(1))  # its channel is open
        pair.server._newcomers = Newcomers[Any](asyncio.Task.cancel, limit=3)
        silent = [await _silent(pair) for _ in range(8)]
        for reader, _ in silent[:5]:
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
        await pair.pool.put(pair.reservation, whole(1))
        assert pair.sent.channels == 1  # the same channel
        assert pair.target.lost == []
        for _, writer in silent:
            writer.close()
        await until(lambda: not len(pair.server._newcomers))
        assert caplog.messages == []  # who says nothing writes no line


class _Full:
    """A listening socket of a process that has no descriptor left."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_full = True
        self.num_refused = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Any:
        if self.is_full:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()

    def close(self) -> None:
        self._sock.close()


async def test_without_descriptors_the_port_rests_between_its_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(data_server, "ACCEPT_PAUSE_S", 0.2)
    async with _pair() as pair:
        server = pair.server
        listener = server._listeners[0]
        asyncio.get_running_loop().remove_reader(listener.fileno())
        server._listeners.remove(listener)
        full = _Full(listener)
        server._listen(full, server._serve_tcp)
        _, writer = await _silent(pair)  # in the kernel's queue
        await until(lambda: full.num_refused)
        for _ in range(50):
            await asyncio.sleep(0)
        assert full.num_refused < 10
        full.is_full = False
        writer.close()
        await pair.pool.put(pair.reservation, whole(1))
