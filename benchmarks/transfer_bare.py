"""What loopback TCP gives without frames, grants and answers: sockets and threads alone.

Each connection moves an equal share of one memory into another, never the same bytes twice in a
transfer, and answers with one byte. `python -m benchmarks.transfer_bare STREAMS SIZES` is the
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

from benchmarks.peer_load import cpu_seconds
from benchmarks.result import Row, spread
from benchmarks.transfer_ends import Pool
from kvmesh.transfer.native import NativeIo, NativeState, Ranges, load_native, ranges_of

MIB = 1 << 20
_STREAMS = (1, 2)
_BLOCK = 16 << 10
_MIN_MIB = 16


def _share(pool: Pool, mib: int, streams: int, index: int) -> Ranges:
    blocks = mib * MIB // _BLOCK // streams
    return ranges_of([pool.read_view(index * blocks, blocks)])


def bare_rows(sizes: Sequence[int], runs: int, seed: int) -> list[Row]:
    """Rows of all sizes, by copies into the socket and by lending it the memory."""
    native, sizes = load_native(), [mib for mib in sizes if mib >= _MIN_MIB]
    if native is None or not sizes:
        return []
    pool = Pool(max(sizes) * MIB // _BLOCK, _BLOCK, seed)
    rows = []
    for lends in (False, True):
        for streams in _STREAMS:
            name = f"bare tcp x{streams}, {'lent' if lends else 'copied'}"
            for mib, row in _measured(native, pool, sizes, runs, streams, lends=lends):
                head = {"what": name, "shape": "contiguous", "mib": mib, "concurrent": 1}
                rows.append({**head, **row})
    os.close(pool.fd)
    return rows


def _measured(
    native: NativeIo, pool: Pool, sizes: Sequence[int], runs: int, streams: int, *, lends: bool
) -> Iterator[tuple[int, Row]]:
    plan = [mib for mib in sizes for _ in range(runs + 1)]
    with _receiver(streams, plan) as (process, connections), ThreadPoolExecutor(streams) as threads:

        def send(index: int, mib: int) -> None:
            sock, share = connections[index], _share(pool, mib, streams, index)
            native.send(sock.fileno(), share, NativeState(), has_sum=False, lends=lends)
            assert sock.recv(1) == b"k", "the receiver has it"

        pids = (os.getpid(), process.pid)
        for mib in sizes:
            seconds, cpu = [], 0.0
            for number in range(runs + 1):
                if number == 1:  # the first one touches memory and opens windows
                    cpu = sum(map(cpu_seconds, pids))
                started = time.perf_counter()
                list(threads.map(send, range(streams), [mib] * streams))
                seconds.append(time.perf_counter() - started)
            cpu = sum(map(cpu_seconds, pids)) - cpu
            yield (
                mib,
                {
                    "gb_s": spread([mib * MIB / second / 1e9 for second in seconds[1:]]),
                    "ms": spread([second * 1e3 for second in seconds[1:]]),
                    "cpu_s_per_gib": round(cpu * 1024 / (runs * mib), 3),
                },
            )


@contextlib.contextmanager
def _receiver(
    streams: int, plan: Sequence[int]
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


def _receive(streams: int, plan: Sequence[int]) -> None:
    native = load_native()
    assert native is not None, "the sender has it"
    pool = Pool(max(plan) * MIB // _BLOCK, _BLOCK, 0)
    with _tuned(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(streams)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()

        def fill(index: int, sock: socket.socket) -> None:
            with sock:
                for mib in plan:
                    share = _share(pool, mib, streams, index)
                    native.receive(sock.fileno(), share, NativeState(), has_sum=False)
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
    _receive(int(sys.argv[1]), json.loads(sys.argv[2]))
