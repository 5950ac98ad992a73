"""Measures how fast this machine reads memory, and sends to itself over TCP.

Tests: tests/unit/cli/test_link_speed.py.
"""

from __future__ import annotations

import socket
import threading
import time

import numpy as np

_PIECE_BYTES = 4 << 20
_PIECES = 64


def read_bytes_per_s(num_bytes: int = 256 << 20, repeats: int = 3) -> float:
    """Returns the bytes per second of memory reads by one thread, best of some runs."""
    memory = np.ones(num_bytes // 8, dtype=np.int64)
    best = float("inf")
    for _ in range(repeats + 1):  # the first run faults the pages in
        started = time.perf_counter()
        memory.max()
        best = min(best, time.perf_counter() - started)
    return memory.nbytes / best


def loopback_bytes_per_s(pieces: int = _PIECES) -> float:
    """Returns the bytes per second of one TCP connection on the loopback between two threads."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname()[1], pieces))
        sender.start()
        try:
            connection, _ = server.accept()
            with connection:
                buffer = memoryview(bytearray(_PIECE_BYTES))
                started = time.perf_counter()
                received = 0
                while count := connection.recv_into(buffer):
                    received += count
                seconds = time.perf_counter() - started
        finally:
            sender.join()
    return received / seconds


def _send(port: int, pieces: int) -> None:
    piece = memoryview(bytes(_PIECE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(pieces):
            connection.sendall(piece)
