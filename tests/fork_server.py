"""Service processes forked from one that has their modules loaded already.

A service loads some 800 modules before its first line, most of a second of a core, and tests start
hundreds. A fork begins where those are loaded and runs the service's `__main__` as usual. The
server never runs an event loop, a thread or a gRPC call, so a fork inherits nothing but modules,
and the seed of `hash`, which is another one in each process that users start. Meshes that serve a
whole run start as those do: see `Mesh`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvmesh.core.config import child_environment, default_environment
from kvmesh.engine.vllm_check import engine_environment, installation_problems

ROOT = Path(__file__).parents[1]

_LOADED = (
    "services.kvmanager.service",
    "services.scheduler.service",
    "services.prefill.service",
    "services.decode.service",
    "services.gateway.service",
    "services.gateway.processes",
)
_MAX_MESSAGE_BYTES = 1 << 16
_NO_PARENT = 113


class ForkedProcess:
    """A process of the server's, with as much of `subprocess.Popen` as tests of services use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        while self.returncode is None and self._server.hear(block=False):
            pass
        return self.returncode

    def wait(self) -> int:
        """Waits for the end; the exit code."""
        while self.returncode is None:
            self._server.hear(block=True)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # its end is not told yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once; `wait` reaps it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """This side of the server: asks for processes and hears of their ends."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from tests.fork_server import main; main()"),
                    *(str(os.getpid()), str(theirs.fileno())),
                ],
                cwd=ROOT,
                env=child_environment({"OMP_NUM_THREADS": "1"}),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._running: dict[int, ForkedProcess] = {}
        self._begun: deque[ForkedProcess] = deque()

    @property
    def pid(self) -> int:
        """Of the server."""
        return self._process.pid

    def start(self, module: str, arguments: Sequence[str], log: int) -> ForkedProcess:
        """Runs a module as `python -m` does.

        Args:
            log: descriptor of where it writes.
        """
        request = json.dumps([module, *arguments]).encode()
        assert len(request) < _MAX_MESSAGE_BYTES
        socket.send_fds(self._socket, [request], [log])
        while not self._begun:
            self.hear(block=True)
        return self._begun.popleft()

    def hear(self, *, block: bool) -> bool:
        """Takes one message, if there is one or it may wait; whether it did."""
        if not block and not select.select([self._socket], [], [], 0)[0]:
            return False
        message = self._socket.recv(_MAX_MESSAGE_BYTES)
        assert message, "the fork server has ended"
        pid, exit_code = json.loads(message)
        if exit_code is None:
            self._running[pid] = ForkedProcess(self, pid)
            self._begun.append(self._running[pid])
        else:
            self._running.pop(pid).returncode = exit_code
        return True

    def close(self) -> None:
        """Ends the server and all its processes."""
        self._socket.close()
        self._process.wait()


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process, started when it is first asked for."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def main() -> None:
    """The server's process, and each of its forks."""
    parent, descriptor = map(int, sys.argv[1:])
    _die_with(parent)
    for name in _LOADED:
        importlib.import_module(name)
    if not installation_problems():
        # It is loaded for ten seconds and more, and only this environment has it.
        default_environment(engine_environment(1))
        importlib.import_module("kvmesh.engine.vllm_runner")
    gc.freeze()  # collections need not copy what all share
    module, *arguments = _serve(socket.socket(fileno=descriptor))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> list[str]:
    """Forks until the other side is gone; returns in a fork, with what that is to run."""
    me = os.getpid()
    # Whoever interrupts a test run reaches the server too; the run still has processes to end.
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends: dict[int, int] = {}  # pids by a descriptor that says when they end
    while True:
        waiting_for = [control.fileno(), *ends]
        ready, _, _ = select.select(waiting_for, [], [])
        for descriptor in set(ready) & ends.keys():
            pid = ends.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            _say(control, pid, os.waitstatus_to_exitcode(status))
        if control.fileno() not in ready:
            continue
        request, descriptors, _, _ = socket.recv_fds(control, _MAX_MESSAGE_BYTES, 1)
        if not request:
            sys.exit()
        pid = os.fork()
        if not pid:
            control.close()
            for descriptor in ends:
                os.close(descriptor)
            _die_with(me)
            signal.signal(signal.SIGINT, interrupted)
            for stream in (1, 2):
                os.dup2(descriptors[0], stream)
            os.close(descriptors[0])
            command: list[str] = json.loads(request)
            return command
        os.close(descriptors[0])
        ends[os.pidfd_open(pid)] = pid
        _say(control, pid, None)


def _say(control: socket.socket, *message: Any) -> None:
    control.send(json.dumps(message).encode())


def _die_with(parent: int) -> None:
    """Lets the kernel kill this process with its parent: a killed test run leaves nobody behind."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(_NO_PARENT)
