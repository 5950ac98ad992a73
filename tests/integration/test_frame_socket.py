"""A socket of the data channel: who waits on it is woken, and threads may read it as they did."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from kvmesh.core.errors import LostError
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import CancelFrame
from tests.transfer_pair import BLOCK, STALL_S, until


async def test_a_cut_socket_wakes_its_reader_and_its_writer() -> None:
    left, right = socket.socketpair()
    threads = ThreadPoolExecutor()
    frames = FrameSocket(left, BLOCK, 30, threads)
    writing = asyncio.create_task(frames.send(bytes(64 << 20)))
    reading = asyncio.create_task(frames.receive())
    await asyncio.sleep(0)

    frames.cut("a reason")

    for task in (writing, reading):
        with pytest.raises(LostError, match="a reason"):
            await task
    frames.close()
    right.close()
    threads.shutdown()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run])
def test_a_watched_socket_stays_blocking_for_its_threads(
    run: Callable[[Coroutine[None, None, None]], None],
) -> None:
    async def scenario() -> None:
        left, right = socket.socketpair()
        with right, ThreadPoolExecutor(1) as threads:
            frames = FrameSocket(left, BLOCK, STALL_S, threads)
            reading = asyncio.create_task(frames.receive())
            await until(lambda: frames._is_watched)
            assert os.get_blocking(left.fileno())
            right.sendall(encode_frame(CancelFrame(1)))
            assert await reading == CancelFrame(1)
            assert os.get_blocking(left.fileno())
            frames.close()

    run(scenario())
