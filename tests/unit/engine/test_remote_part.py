"""Lines for copies: what neither side believes. Bytes are compared in test_divided_pool.py."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvmesh.core.errors import LostError
from kvmesh.engine import remote_part
from kvmesh.engine.remote_part import PartServer, RemotePart
from kvmesh.transfer.device import Pieces
from tests.device_twin import TwinDriver
from tests.waiting import until

PIECE, NUM_PIECES = 40, 9
RUNS = [(8, 24), (64, 16)]


class Pair:
    """A part with lines to its rank."""

    def __init__(self, num_lines: int = 1) -> None:
        self.driver = TwinDriver()
        self.memory = self.driver.zeros(PIECE * NUM_PIECES)
        self.memory.copy_(torch.arange(PIECE * NUM_PIECES) % 251)
        server = PartServer(self.driver, self.memory, RUNS)
        self.lines = []
        for _ in range(num_lines):
            ours, theirs = socket.socketpair()
            server.serve(theirs)
            self.lines.append(ours)
        self.part = RemotePart(self.lines, RUNS)
        self.host = torch.zeros(4096, dtype=torch.uint8)
        self.copies = self.part.copies(self.host)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.part.close()


def pieces(*starts: int, size: int = 16) -> Pieces:
    """Pieces of the part."""
    return Pieces(np.array(starts, dtype=np.int64), size)


def test_copies_are_larger_than_the_ranks_staging_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_part, "STAGING_BYTES", 40)  # two pieces, and half of one
    small = Pair()
    wanted = pieces(0, 100, 40, 340, 20)
    small.copies.gather(wanted, 8, 20, None)
    for number, start in enumerate(wanted.starts):
        found = small.host[8 + 20 * number : 24 + 20 * number]
        assert torch.equal(found, small.memory[start : start + 16])
    small.host[:] = 77
    small.copies.scatter(wanted, 0, 16, None)
    assert int((small.memory == 77).sum()) >= 5 * 16
    small.part.close()


@pytest.mark.parametrize(
    "request_",
    [
        struct.pack("<BIQ", 2, 1, 16) + bytes(8),
        struct.pack("<BIQ", 0, 0, 16),
        struct.pack("<BIQ", 0, 1 << 31, 16),
        struct.pack("<BIQ", 0, 1, 0) + bytes(8),
        struct.pack("<BIQ", 0, 1, 1 << 40) + bytes(8),
        struct.pack("<BIQq", 0, 1, 16, -1),
        struct.pack("<BIQq", 1, 1, 16, PIECE * NUM_PIECES - 15) + bytes(16),
    ],
    ids=["kind", "none", "many", "empty", "large", "before", "behind"],
)
async def test_copies_outside_of_the_part_are_refused(
    pair: Pair, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before = pair.memory.clone()
    (line,) = pair.lines
    line.sendall(request_)
    with contextlib.suppress(ConnectionResetError):  # it is cut with bytes unread
        assert line.recv(1) == b""
    await until(lambda: "rank_copy_refused" in caplog.text, "it is told")
    assert torch.equal(pair.memory, before)
    await until(lambda: not pair.driver.pinned_bytes, "its memory is free")


def test_a_failing_device_is_named_and_nobody_waits_for_its_line(pair: Pair) -> None:
    pair.driver.is_broken = True
    with pytest.raises(LostError, match="a rank on another host: the device is gone"):
        pair.copies.gather(pieces(0), 0, 16, None)
    with pytest.raises(LostError, match="a rank on another host"):
        pair.copies.scatter(pieces(0), 0, 16, None)


def test_a_rank_that_is_gone_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    part = RemotePart([ours], RUNS)
    with pytest.raises(LostError, match="a rank on another host"):
        part.copies(torch.zeros(64, dtype=torch.uint8)).gather(pieces(0), 0, 16, None)
    part.close()


def test_more_pieces_than_were_asked_for_are_not_taken() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        part = RemotePart([ours], RUNS)
        theirs.sendall(struct.pack("<BI", 0, 3) + bytes(48))
        with pytest.raises(LostError, match="3 pieces came, 2 were asked"):
            part.copies(torch.zeros(64, dtype=torch.uint8)).gather(pieces(0, 16), 0, 16, None)
        part.close()


def test_copies_share_the_lines() -> None:
    pair = Pair(num_lines=2)
    whole = pieces(*range(0, PIECE * NUM_PIECES, 8), size=8)

    def copy(number: int) -> bytes:
        host = torch.zeros(whole.num_bytes, dtype=torch.uint8)
        pair.part.copies(host).gather(whole, 0, 8, None)
        return bytes(host.numpy())

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(copy, range(64)))
    assert found == {bytes(pair.memory.numpy())}
    pair.part.close()
