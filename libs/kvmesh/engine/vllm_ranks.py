"""Starts the other ranks of a worker's engine: each computes some heads of every layer.

Rank 0 is the leader and runs in the worker's own process: it plans steps, samples, and is the only
one that other services talk to. It sends each step and the sampled tokens to the others. The heads
of a rank are one part of every block, in a pool of all ranks or on the rank's device
(docs/adr/0046-ranks-share-one-pool.md).

If a rank dies, the worker's process ends at once: no step can be computed without the rank, and the
leader's step may wait for it forever in native code.

Torch-free. Tests: tests/unit/engine/test_vllm_ranks.py, tests/vllm/test_ranks.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmesh.engine.vllm_messages import (
    EngineRequest,
    Place,
    encoded,
    pool_message,
    receive,
    request_message,
)
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

LOST_EXIT = 70
"""Exit code of a worker that has lost a rank."""

FOLLOWER = (sys.executable, "-m", "kvmesh.engine.vllm_follower")
_END_S = 5.0


def _end_process() -> None:
    sys.stderr.flush()
    os._exit(LOST_EXIT)


class Ranks:
    """Ranks 1, 2, ... of an engine; none if the engine has only one rank."""

    def __init__(
        self,
        request: EngineRequest,
        *,
        command: Sequence[str] = FOLLOWER,
        on_lost: Callable[[], None] = _end_process,
    ) -> None:
        """Starts the processes. They load the model together with rank 0.

        Args:
            command: command line of a rank; the number of its socket is appended.
            on_lost: called from another thread when a rank has ended unexpectedly.
        """
        self._on_lost = on_lost
        self._ends: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="kvmesh-ranks-")
        # vLLM names shared memory after the file, so its name is nobody else's either.
        self._meeting = Path(self._folder.name) / Path(self._folder.name).name
        self._spin = request.spin
        self._device = request.device
        for rank in range(1, request.num_ranks):
            self._start(command, request, rank)

    @property
    def place(self) -> Place:
        """The place of rank 0."""
        return Place(0, str(self._meeting))

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank, starting with rank 1."""
        return [each.pid for each in self._processes]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Sends a message to each rank.

        Raises:
            OSError: a rank has ended.
        """
        if self._ends:
            raw = encoded(message)
            for end in self._ends:
                end.sendall(raw)

    def allow_cache(self, num_bytes: int = 0, fd: int | None = None) -> None:
        """Tells all ranks to allocate their caches.

        Args:
            num_bytes: size of the pool that they share; 0: each has memory of its own device.
            fd: memfd of the pool.
        """
        self.tell(pool_message(num_bytes))
        for end in self._ends:
            if fd is not None:
                socket.send_fds(end, [b"f"], [fd])

    def loaded(self) -> None:
        """Rank 0 has loaded, so all ranks have met."""
        # Ranks on devices meet again at the first exchange between any two of these.
        if self._device is None:
            self._folder.cleanup()

    def hear(self) -> list[dict[str, Any]]:
        """Waits for a message of each rank, and returns them by rank, starting with rank 1.

        Raises:
            EOFError: a rank has ended.
        """
        return [receive(end) for end in self._ends]

    def close(self) -> None:
        """Ends all ranks. May be called again."""
        self._closing = True
        for end in self._ends:
            end.close()
        for process in self._processes:
            _end_of(process)
        self._ends.clear()
        self._folder.cleanup()

    def _start(self, command: Sequence[str], request: EngineRequest, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            # The rank ends when its standard input is closed, which happens when this process ends.
            process = subprocess.Popen(
                [*command, str(fd)], stdin=subprocess.PIPE, pass_fds=[fd], close_fds=True
            )
        self._ends.append(ours)
        self._processes.append(process)
        ours.sendall(encoded(request_message(request, self._place_of(rank))))
        watch = threading.Thread(
            target=self._watch, args=(process, rank), name=f"rank-{rank}", daemon=True
        )
        watch.start()

    def _place_of(self, rank: int) -> Place:
        path = self._meeting
        if not self._spin:
            path = self._meeting.with_name(f"{self._meeting.name}-{rank}")
            path.symlink_to(self._meeting)
        return Place(rank, str(path))

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        code = process.wait()
        if not self._closing:
            log.error("rank_lost", rank=rank, pid=process.pid, exit_code=code)
            self._on_lost()


def _end_of(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "a pipe"
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
