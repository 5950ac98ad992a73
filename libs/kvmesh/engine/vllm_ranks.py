"""Starts the other ranks of a worker's engine: each computes some heads of every layer.

Rank 0 is the leader and runs in the worker's own process: it plans steps, samples, and is the only
one that other services talk to. It sends each step and the sampled tokens to the others. The heads
of a rank are one part of every block, in a pool of all ranks or on the rank's device
(docs/adr/0046-ranks-share-one-pool.md).

Ranks of other hosts are started there (`rank_host`), and dial the leader's gate.

If a rank dies, the worker's process ends at once: no step can be computed without the rank, and the
leader's step may wait for it forever in native code.

Torch-free. Tests: tests/unit/engine/test_vllm_ranks.py, tests/vllm/test_ranks.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvmesh.core.errors import ConfigError
from kvmesh.engine.rank_lines import NUM_LINES, LineKind, RankGate, cut
from kvmesh.engine.vllm_messages import (
    LEADER,
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
_TELL_S = 10.0
_LINE_S = 60.0
_HERE = "127.0.0.1"


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
        gate: RankGate | None = None,
    ) -> None:
        """Starts the processes, and waits for other hosts. All load the model with rank 0.

        Args:
            command: command line of a rank; the number of its socket is appended.
            on_lost: called from another thread when a rank has ended unexpectedly.
            gate: where other hosts dial; None: there are none.
        """
        self._on_lost = on_lost
        self._gate = gate
        self._ends: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._hosts: list[socket.socket] = []
        self._closing = False
        self._folder = tempfile.TemporaryDirectory(prefix="kvmesh-ranks-")
        # vLLM names shared memory after the file, so its name is nobody else's either.
        self._meeting = Path(self._folder.name) / Path(self._folder.name).name
        self._port = 0 if gate is None else _free_port()
        self._host_ranks = request.host_ranks
        self._spin = request.spin
        self._device = request.device
        try:
            self._begin(command, request)
        except BaseException:
            self.close()
            raise

    @property
    def place(self) -> Place:
        """The place of rank 0."""
        if self._port:
            return self._place_of(0).meets_at(_HERE)
        return Place(0, self._meeting.as_uri())

    @property
    def pids(self) -> list[int]:
        """Process ids on this host, by rank, starting with rank 1."""
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

    def copy_lines(self, rank: int) -> list[socket.socket]:
        """The lines for copies to a rank of another host, after its message that it has loaded.

        Raises:
            ConfigError: they did not arrive.
        """
        return [self._line(LineKind.COPIES, rank) for _ in range(NUM_LINES)]

    def close(self) -> None:
        """Ends all ranks. May be called again."""
        self._closing = True
        for end in self._ends:
            end.close()
        for host in self._hosts:
            cut(host)  # wakes the thread that watches it
            host.close()
        self._hosts.clear()
        for process in self._processes:
            end_follower(process)
        self._ends.clear()
        self._folder.cleanup()

    def _begin(self, command: Sequence[str], request: EngineRequest) -> None:
        for rank in range(1, request.host_ranks):
            self._start(command, request, rank)
        for host in range(1, request.num_hosts):
            self._await_host(host)
        for rank in range(request.host_ranks, request.num_ranks):
            self._ends.append(self._line(LineKind.STEPS, rank))
            self._ends[-1].sendall(encoded(request_message(request, self._place_of(rank))))

    def _start(self, command: Sequence[str], request: EngineRequest, rank: int) -> None:
        place = self._place_of(rank).meets_at(_HERE)
        process, ours = start_follower(command, request_message(request, place))
        self._ends.append(ours)
        self._processes.append(process)
        watch = threading.Thread(
            target=self._watch, args=(process, rank), name=f"rank-{rank}", daemon=True
        )
        watch.start()

    def _place_of(self, rank: int) -> Place:
        local = rank % self._host_ranks
        if self._port:
            # vLLM takes ranks for neighbours with shared memory if this ends alike.
            return Place(rank, f"tcp://{LEADER}:{self._port}?of={rank}", local)
        path = self._meeting
        if not self._spin:
            path = self._meeting.with_name(f"{self._meeting.name}-{rank}")
            path.symlink_to(self._meeting)
        return Place(rank, path.as_uri(), local)

    def _await_host(self, host: int) -> None:
        assert self._gate is not None, "there are other hosts"
        while (line := self._gate.take(LineKind.HOST, host, _TELL_S)) is None:
            log.info("waiting_for_ranks", host=host, port=self._gate.port)
        log.info("ranks_joined", host=host, address=line.getpeername()[0])
        self._hosts.append(line)
        watch = threading.Thread(
            target=self._watch_host, args=(line, host), name=f"rank-host-{host}", daemon=True
        )
        watch.start()

    def _line(self, kind: LineKind, rank: int) -> socket.socket:
        assert self._gate is not None, "there are other hosts"
        line = self._gate.take(kind, rank, _LINE_S)
        if line is None:
            raise ConfigError(f"rank {rank} did not connect within {_LINE_S:g} s; see its log")
        return line

    def _watch_host(self, line: socket.socket, host: int) -> None:
        with contextlib.suppress(OSError):
            line.recv(1)  # it says nothing; this returns when the host has ended, or is gone
        if not self._closing:
            log.error("ranks_lost", host=host)
            self._on_lost()

    def _watch(self, process: subprocess.Popen[bytes], rank: int) -> None:
        code = process.wait()
        if not self._closing:
            log.error("rank_lost", rank=rank, pid=process.pid, exit_code=code)
            self._on_lost()


def start_follower(
    command: Sequence[str], message: Mapping[str, Any]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts the process of a rank; returns it with a socket to it.

    Args:
        command: as of `Ranks`.
        message: the first one that it hears.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        # The rank ends when its standard input is closed, which happens when this process ends.
        process = subprocess.Popen(
            [*command, str(fd)], stdin=subprocess.PIPE, pass_fds=[fd], close_fds=True
        )
    ours.sendall(encoded(message))
    return process, ours


def end_follower(process: subprocess.Popen[bytes]) -> None:
    """Ends the process of a rank, and waits until it has ended."""
    assert process.stdin is not None, "a pipe"
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    """A port for vLLM's own rendezvous, which takes none that is open."""
    with socket.create_server(("", 0)) as found:
        port: int = found.getsockname()[1]
    return port
