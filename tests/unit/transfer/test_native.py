"""The compiled copies and socket calls against Python."""

import contextlib
import errno
import fcntl
import os
import random
import socket
import threading
from collections.abc import Iterator

import crc32c
import pytest

from kvmesh.transfer.memory import copy_in_python
from kvmesh.transfer.native import NativeIo, NativeState, address_of, load_native, ranges_of
from tests.descriptors import no_descriptor_left
from tests.native import needs_transfer_library

pytestmark = needs_transfer_library


@pytest.fixture
def native() -> NativeIo:
    found = load_native()
    assert found is not None
    return found


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def cut(data: bytearray, seed: int) -> list[memoryview]:
    """The bytes as views of random lengths, some of them empty."""
    rng, views, at = random.Random(seed), list[memoryview](), 0
    while at < len(data):
        size = rng.choice([0, 1, 7, 4096, 16384, 70_000, 300_000])
        views.append(memoryview(data)[at : at + size])
        at += size
    return views


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("size", [300_000, 3_000_000])  # the large one passes the cache by
def test_copy_is_the_copy_of_python(native: NativeIo, is_short: bool, size: int) -> None:
    source = bytearray(random.Random(1).randbytes(size))
    fast, plain = bytearray(size), bytearray(size)
    native.copy(ranges_of(cut(fast, 2)), ranges_of(cut(source, 3)), is_short=is_short)
    sources = [(address_of(view), view.nbytes) for view in cut(source, 3) if view]
    copy_in_python([view for view in cut(plain, 2) if view], sources)
    assert fast == plain == source


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_threads_share_a_copy(native: NativeIo, num_threads: int) -> None:
    size = (5 << 20) + 12_345
    source, target = bytearray(random.Random(1).randbytes(size)), bytearray(size)
    ranges = ranges_of(cut(target, 2)), ranges_of(cut(source, 3))
    native.copy(*ranges, is_short=False, num_threads=num_threads)
    assert target == source


def test_a_look_at_a_socket(native: NativeIo, sockets: tuple[socket.socket, socket.socket]) -> None:
    fd = sockets[0].fileno()
    assert not native.poll(fd, 0)
    assert not native.poll(fd, 0.001)
    sockets[1].send(b"x")
    assert native.poll(fd, 0)
    assert sockets[0].recv(9) == b"x", "nothing was taken"
    assert not native.poll(fd, 0)
    sockets[1].close()
    assert native.poll(fd, 0), "the end is something to see"


@pytest.mark.parametrize("size", [1, 7, 8, 9, 2048, 6143, 6144, 6145, 100_003])
@pytest.mark.parametrize("value", [0, 0xDEADBEEF])
def test_crc32c_is_the_one_of_the_package(native: NativeIo, size: int, value: int) -> None:
    if not native.has_crc32c:
        pytest.skip("this processor has no instruction for it")
    data = random.Random(size).randbytes(size + 3)
    for start in range(3):  # any alignment
        view = memoryview(bytearray(data))[start : start + size]
        assert native.crc32c(ranges_of([view]), value) == crc32c.crc32c(view, value)


@pytest.mark.parametrize("has_sum", [True, False])
def test_bytes_arrive_in_order_with_their_sum(
    native: NativeIo, sockets: tuple[socket.socket, socket.socket], has_sum: bool
) -> None:
    source = bytearray(random.Random(4).randbytes(3_000_000))
    target = bytearray(len(source))
    state, sums = NativeState(), list[int]()

    def receive() -> None:
        into = ranges_of(cut(target, 5))
        sums.append(native.receive(sockets[1].fileno(), into, NativeState(), has_sum=has_sum))

    receiver = threading.Thread(target=receive)
    receiver.start()
    fd = sockets[0].fileno()
    sums.append(native.send(fd, ranges_of(cut(source, 6)), state, has_sum=has_sum))
    receiver.join()

    assert target == source
    assert state.moved == len(source)
    assert sums == [crc32c.crc32c(bytes(source)) if has_sum else 0] * 2


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as left,
        listener.accept()[0] as right,
    ):
        yield left, right


@pytest.mark.parametrize("has_sum", [True, False])
@pytest.mark.parametrize("views", ["long", "cut"])
@pytest.mark.parametrize("may_lend", [True, False])
def test_lent_bytes_arrive_and_a_kernel_that_lends_none_copies_them(
    native: NativeIo,
    connection: tuple[socket.socket, socket.socket],
    has_sum: bool,
    views: str,
    may_lend: bool,
) -> None:
    source = bytearray(random.Random(4).randbytes(5_000_003))
    target = bytearray(len(source))
    size = 1_500_001 if views == "long" else 8193
    pieces = [memoryview(source)[at : at + size] for at in range(0, len(source), size)]
    state = NativeState()
    sent, ranges = list[int](), ranges_of(pieces)

    def send() -> None:
        sent.append(native.send(connection[0].fileno(), ranges, state, has_sum=has_sum, lends=True))

    sender = threading.Thread(target=send)
    with contextlib.nullcontext() if may_lend else no_descriptor_left():
        sender.start()
        received = native.receive(
            connection[1].fileno(), ranges_of(cut(target, 5)), NativeState(), has_sum=has_sum
        )
        sender.join()
    assert target == source
    assert state.moved == len(source)
    assert [received, *sent] == [crc32c.crc32c(bytes(source)) if has_sum else 0] * 2


def test_a_socket_that_takes_no_pages_gets_copies(
    native: NativeIo, connection: tuple[socket.socket, socket.socket]
) -> None:
    left, right = connection
    # Pages are spliced to nothing that appends; bytes are sent all the same.
    fcntl.fcntl(left, fcntl.F_SETFL, fcntl.fcntl(left, fcntl.F_GETFL) | os.O_APPEND)
    source, target = bytearray(random.Random(5).randbytes(65_536)), bytearray(65_536)
    ranges, state = ranges_of([memoryview(source)]), NativeState()
    native.send(left.fileno(), ranges, state, has_sum=False, lends=True)
    native.receive(right.fileno(), ranges_of([memoryview(target)]), NativeState(), has_sum=False)
    assert target == source
    assert state.moved == len(source)


def test_what_is_not_lent_may_change_at_once(
    native: NativeIo, connection: tuple[socket.socket, socket.socket]
) -> None:
    source, target = bytearray(b"a" * 65_536), bytearray(65_536)
    ranges, state = ranges_of([memoryview(source)]), NativeState()
    native.send(connection[0].fileno(), ranges, state, has_sum=False)
    source[:] = b"b" * len(source)
    into = ranges_of([memoryview(target)])
    native.receive(connection[1].fileno(), into, NativeState(), has_sum=False)
    assert target == b"a" * len(target)


def test_the_end_of_the_stream_and_a_closed_peer_are_errors(
    native: NativeIo, sockets: tuple[socket.socket, socket.socket]
) -> None:
    target = bytearray(10)
    fd, ranges = sockets[0].fileno(), ranges_of([memoryview(target)])
    sockets[1].sendall(b"abc")
    sockets[1].close()
    with pytest.raises(ConnectionResetError):
        native.receive(fd, ranges, NativeState(), has_sum=False)
    assert target[:3] == b"abc"
    with pytest.raises(BrokenPipeError):
        native.send(fd, ranges, NativeState(), has_sum=False)


def test_a_stopped_call_moves_nothing_more(
    native: NativeIo, sockets: tuple[socket.socket, socket.socket]
) -> None:
    target = bytearray(10)
    fd, ranges = sockets[0].fileno(), ranges_of([memoryview(target)])
    sockets[1].sendall(bytes(range(10)))
    for call in (native.receive, native.send):
        with pytest.raises(OSError, match="data socket") as caught:
            call(fd, ranges, NativeState(0, 1), has_sum=False)
        assert caught.value.errno == errno.ECANCELED
    assert target == bytes(10)
