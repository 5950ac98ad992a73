"""A socket of the data channel: who waits on it is woken, and threads may read it as they did."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


class Restless:
    """A socket on which there is always one frame more, as many as a test wants."""

    def __init__(self, sock: socket.socket, num_frames: int) -> None:
        self._sock = sock
        self._left = memoryview(encode_frame(CancelFrame(1)) * num_frames)

    def recvmsg_into(
        self, buffers: Iterable[memoryview], *_: int
    ) -> tuple[int, list[Any], int, None]:
        buffer = next(iter(buffers))
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count, [], 0, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.fixture
def restless() -> Iterator[tuple[Restless, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        right.sendall(b"to be read")
        yield Restless(left, 20_000), right


@pytest.mark.parametrize("greedy", [False, True])
async def test_a_peer_whose_frames_never_end_has_the_loop_with_others(
    restless: tuple[Restless, socket.socket], greedy: bool
) -> None:
    wire: Any = restless[0]
    with ThreadPoolExecutor(1) as threads:
        frames = FrameSocket(wire, BLOCK, 30, threads)

        async def read_all() -> int:
            count = 0
            while await frames.receive(greedy=greedy) is not None:
                count += 1
            return count

        reading = asyncio.create_task(read_all())
        turns = 0
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        assert await reading == 20_000
        assert turns > 10
        frames.close()


async def test_answers_that_never_end_are_read_in_many_turns(
    restless: tuple[Restless, socket.socket],
) -> None:
    wire: Any = restless[0]
    with ThreadPoolExecutor(1) as threads:
        frames = FrameSocket(wire, BLOCK, 30, threads)
        events: list[object] = []
        causes: list[str] = []
        frames.read_on(events.append, causes.append)
        seen: list[int] = []
        while not causes:
            await asyncio.sleep(0)
            seen.append(len(events))
        assert len(events) == 20_000
        assert len(set(seen)) > 10
        frames.close()


async def test_connections_share_the_memory_that_heads_arrive_in() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    with ThreadPoolExecutor(1) as threads:
        one, other = (FrameSocket(left, BLOCK, 30, threads) for left, _ in pairs)
        assert one._scratch is other._scratch
        halves = [encode_frame(CancelFrame(number)) for number in (1, 2)]
        reading = [asyncio.create_task(each.receive()) for each in (one, other)]
        for place in (slice(0, 10), slice(10, 30), slice(30, None)):
            for (_, right), data in zip(pairs, halves, strict=True):
                right.sendall(data[place])
            await asyncio.sleep(0.01)
        assert await asyncio.gather(*reading) == [CancelFrame(1), CancelFrame(2)]
        for frames, (_, right) in zip((one, other), pairs, strict=True):
            frames.close()
            right.close()
