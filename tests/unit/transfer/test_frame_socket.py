"""What a socket of frames does beside its loop."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvmesh.core.clock import ManualClock, SystemClock
from kvmesh.core.errors import LostError
from kvmesh.transfer import frame_socket
from kvmesh.transfer.codec import encode_frame
from kvmesh.transfer.decoder import FrameEvent
from kvmesh.transfer.frame_socket import FrameSocket
from kvmesh.transfer.frames import CommitOkFrame, DataFrame, Frame, PutOkFrame
from kvmesh.transfer.native import NativeIo
from kvmesh.transfer.pacing import Pacer
from tests.native import needs_transfer_library


@needs_transfer_library
async def test_answers_are_taken_without_the_loop() -> None:
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


@needs_transfer_library
async def test_each_kind_of_frame_has_looks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nothing follows does not end the looks after one that another follows."""
    left, right = socket.socketpair()
    newest: list[Frame] = []
    looks: list[type[Frame]] = []

    def poll(native: NativeIo, fd: int, wait_s: float) -> bool:
        if newest:
            looks.append(type(newest[-1]))
        return bool(newest) and isinstance(newest[-1], PutOkFrame)

    monkeypatch.setattr(NativeIo, "poll", poll)
    with right, ThreadPoolExecutor(1) as threads:
        frames = FrameSocket(left, 4096, 5.0, threads, poll_s=1e-4)
        for number in range(1, 101):
            for frame in (PutOkFrame(number, 4096), CommitOkFrame(number)):
                right.send(encode_frame(frame))
                assert await frames.receive() == frame
                newest.append(frame)
        frames.close()
    assert looks.count(PutOkFrame) == 100
    assert looks.count(CommitOkFrame) < 10


async def test_a_payload_that_waits_for_its_budget_ends_with_the_socket() -> None:
    pacer = Pacer(1.0, SystemClock())
    pacer.delay(1 << 20)  # the rest waits for days
    left, right = socket.socketpair()
    with right, ThreadPoolExecutor(1) as threads:
        frames = FrameSocket(left, 4096, 5.0, threads)
        payload = [memoryview(bytes(4096))]
        head = encode_frame(DataFrame(1, 4096, checksum=False), 4096)
        sending = asyncio.create_task(frames.send_payload(head, payload, None, pacer))
        await asyncio.sleep(0)
        assert not sending.done()
        frames.cut("given up")
        with pytest.raises(LostError, match="given up"):
            await sending
        with pytest.raises(LostError, match="given up"):
            await frames.send_payload(head, payload, None, pacer)
        frames.close()


@needs_transfer_library
async def test_a_peer_that_never_rests_leaves_the_loop_a_turn_each_millisecond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, clock, turns = asyncio.get_running_loop(), ManualClock(100.0), 0

    def poll(native: NativeIo, fd: int, wait_s: float) -> bool:
        clock.advance(wait_s)
        return True

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    monkeypatch.setattr(NativeIo, "poll", poll)
    monkeypatch.setattr(frame_socket, "monotonic", clock.now)
    left, right = socket.socketpair()
    with right, ThreadPoolExecutor(1) as threads:
        frames = FrameSocket(left, 4096, 5.0, threads, poll_s=2e-4)
        right.send(b"".join(encode_frame(PutOkFrame(n, 4096)) for n in range(100)))
        turn()
        for number in range(100):
            assert await frames.receive() == PutOkFrame(number, 4096)
        frames.close()
    assert 15 <= turns <= 25  # 100 looks of a fifth of a millisecond
