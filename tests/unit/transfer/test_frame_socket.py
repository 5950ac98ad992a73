"""What a socket of frames does beside its loop."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import FrameEvent
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import PutOkFrame
from kvmesh.transfer.native import load_native


async def test_answers_are_taken_without_the_loop() -> None:
    if load_native() is None:
        pytest.skip("needs a C++ compiler")
    taken, ended = list[FrameEvent](), list[str]()
    left, right = socket.socketpair()
    with right, ThreadPoolExecutor(1) as threads:
        frames = FrameSocket(left, 4096, 5.0, threads, poll_s=1e-4)
        frames.read_soon()  # nobody reads on yet
        frames.read_on(taken.append, ended.append)
        frames.read_soon()
        assert taken == []
        right.send(encode_frame(PutOkFrame(7, 4096)))
        frames.read_soon()  # not this time: the last look was for nothing
        assert taken == []
        frames.read_soon()
        assert taken == [PutOkFrame(7, 4096)]
        right.close()
        frames.read_soon()
        assert ended == ["data channel: closed by the peer"]
        frames.read_soon()  # it is not watched any more
        await asyncio.sleep(0)
        assert len(ended) == 1
        frames.close()
