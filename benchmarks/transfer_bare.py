"""What loopback TCP gives without frames, grants and answers: sockets and threads alone.

Bytes leave copied into the socket, lent to it, or by sendfile out of the pool's memfd.

Each connection moves an equal share of one memory into another, never the same bytes twice in a
transfer, and answers with one byte. `python -m benchmarks.transfer_bare STREAMS SHARES` is the
receiver: it prints its port and lives until its connections end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from benchmarks.peer_load import cpu_seconds
from benchmarks.result import Row, spread
from benchmarks.transfer_ends import Pool, shuffled
from kvmesh.transfer.native import (
    NativeIo,
    NativeState,
    PlacedViews,
    Ranges,
    load_native,
    ranges_of,
)

MIB = 1 << 20
_STREAMS = (1, 2)
_BLOCK = 16 << 10
_MIN_MIB = 16


_COPIED, _LENT, _SENDFILE = "copied", "lent", "sendfile"


class Share(NamedTuple):
    """What one transfer moves.

    Attributes:
        is_scattered: its blocks lie in a random order, another one at each end.
    """

    mib: int
    is_scattered: bool

    def ranges(self, pool: Pool, streams: int, index: int) -> Ranges:
        """Those of one connection."""
        total = self.mib * MIB // _BLOCK
        blocks = total // streams
        first = index * blocks
        if not self.is_scattered:
            return ranges_of([pool.read_view(first, blocks)])
        order = np.array(shuffled(total, pool.seed)[first : first + blocks])
        places = np.column_stack((order * _BLOCK, np.full_like(order, _BLOCK)))
        return ranges_of(PlacedViews(pool.view, places))


def bare_rows(sizes: Sequence[int], runs: int, seed: int) -> list[Row]:
    """Rows of all sizes, by each way into the socket."""
    native, sizes = load_native(), [mib for mib in sizes if mib >= _MIN_MIB]
    if native is None or not sizes:
        return []
    pool = Pool(max(sizes) * MIB // _BLOCK, _BLOCK, seed)
    rows = []
    shares = [Share(mib, False) for mib in sizes]
    pieces = [Share(mib, True) for mib in sizes]
    for way, plan in ((_COPIED, shares), (_LENT, shares + pieces), (_SENDFILE, shares)):
        for streams in _STREAMS:
            name = f"bare tcp x{streams}, {way}"
            for share, row in _measured(native, pool, plan, runs, streams, way):
                shape = "16 KiB pieces" if share.is_scattered else "contiguous"
                head = {"what": name, "shape": shape, "mib": share.mib, "concurrent": 1}
                rows.append({**head, **row})
    os.close(pool.fd)
    return rows


def _measured(
    native: NativeIo, pool: Pool, shares: Sequence[Share], runs: int, streams: int, way: str
) -> Iterator[tuple[Share, Row]]:
    plan = [share for share in shares for _ in range(runs + 1)]
    with _receiver(streams, plan) as (process, connections), ThreadPoolExecutor(streams) as threads:

        def send(index: int, ranges: Ranges) -> None:
            sock = connections[index]
            if way == _SENDFILE:
                _send_file(sock, pool, ranges)
            else:
                lends = way == _LENT
                native.send(sock.fileno(), ranges, NativeState(), has_sum=False, lends=lends)
            assert sock.recv(1) == b"k", "the receiver has it"

        pids = (os.getpid(), process.pid)
        for share in shares:
            ranges = [share.ranges(pool, streams, index) for index in range(streams)]
            seconds, cpu = [], 0.0
            for number in range(runs + 1):
                if number == 1:  # the first one touches memory and opens windows
                    cpu = sum(map(cpu_seconds, pids))
                started = time.perf_counter()
                list(threads.map(send, range(streams), ranges))
                seconds.append(time.perf_counter() - started)
            cpu = sum(map(cpu_seconds, pids)) - cpu
            mib = share.mib
            yield (
                share,
                {
                    "gb_s": spread([mib * MIB / second / 1e9 for second in seconds[1:]]),
                    "ms": spread([second * 1e3 for second in seconds[1:]]),
                    "cpu_s_per_gib": round(cpu * 1024 / (runs * mib), 3),
                },
            )


def _send_file(sock: socket.socket, pool: Pool, ranges: Ranges) -> None:
    begin = ranges_of([pool.view])[0][0]
    for address, size in ranges.tolist():
        at, end = address - begin, address - begin + size
        while at < end:
            at += os.sendfile(sock.fileno(), pool.fd, at, end - at)


@contextlib.contextmanager
def _receiver(
    streams: int, plan: Sequence[Share]
) -> Iterator[tuple[subprocess.Popen[str], list[socket.socket]]]:
    command = [sys.executable, "-m", "benchmarks.transfer_bare", str(streams), json.dumps(plan)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with contextlib.ExitStack() as stack:
        stack.callback(process.stdout.close)
        stack.callback(process.wait, 30)
        address = ("127.0.0.1", int(process.stdout.readline()))
        connections = []
        for _ in range(streams):
            sock = _tuned(stack.enter_context(socket.socket()))
            sock.connect(address)
            connections.append(sock)
        yield process, connections


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _receive(streams: int, plan: Sequence[Share]) -> None:
    native = load_native()
    assert native is not None, "the sender has it"
    pool = Pool(max(share.mib for share in plan) * MIB // _BLOCK, _BLOCK, 0)
    with _tuned(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(streams)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()

        def fill(index: int, sock: socket.socket) -> None:
            # Made before anything comes: only the transfers are measured.
            ranges = {share: share.ranges(pool, streams, index) for share in set(plan)}
            with sock:
                for share in plan:
                    native.receive(sock.fileno(), ranges[share], NativeState(), has_sum=False)
                    sock.sendall(b"k")

        threads = [
            threading.Thread(target=fill, args=(index, listener.accept()[0]))
            for index in range(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    _receive(int(sys.argv[1]), [Share(*share) for share in json.loads(sys.argv[2])])
