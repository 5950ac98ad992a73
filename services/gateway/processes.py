"""A gateway of several processes on one port: starts, watches, replaces and stops them together.

The kernel distributes connections over the processes (SO_REUSEPORT). Their parent serves no client.
It binds the ports, so that they stay reserved while processes come and go, and serves one metrics
port and one admin port for all. It replaces a process that ends or hangs. `kvmesh.core.silence`
decides whether one hangs, by `GET /health` at the process's admin socket. The kernel kills the
processes when their parent dies (`kvmesh.cli.processes.end_with`).
Tests: tests/e2e/test_gateway_processes.py, tests/unit/gateway/test_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from kvmesh.core.children import ask_to_end, kill
from kvmesh.core.config import child_environment
from kvmesh.core.errors import ConfigError
from kvmesh.core.interrupts import leave_when_terminated
from kvmesh.core.silence import until_silent
from kvmesh.runtime.app import metrics_server
from kvmesh.telemetry.exposition import SHARED_FOLDER_VARIABLE, shared_registry
from kvmesh.telemetry.logs import event_logger
from services.gateway.config import GatewayConfig
from services.gateway.process_admin import AllRequests, ProcessSockets, admin_socket, process_admin
from services.gateway.process_folder import shared_folder

log = event_logger(__name__)

PARENT_VARIABLE = "KVMESH_GATEWAY_PARENT"
"""Variable with the parent's process id. The kernel kills a process when its parent dies."""

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
"""Bounds in seconds of the pause before a process is replaced.

It doubles while processes end early.
"""
YOUNG_S = 10.0
STOP_GRACE_S = 5.0
"""Seconds that a process has to end after its drain."""
START_S = 120.0
"""Seconds that a process has until its first answer; the same as `kvmesh up` allows."""

_BAD_CONFIG = 2
_POLL_S = 0.25
_HEALTH = b"GET /health HTTP/1.1\r\nHost: process\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class SharedPorts:
    """Ports of the processes, reserved while the gateway runs."""

    http: int
    grpc: int


@contextlib.contextmanager
def held_ports(config: GatewayConfig) -> Iterator[SharedPorts]:
    """Binds the ports without listening on them.

    Raises:
        ConfigError: a port is taken by a process that does not share it.
    """
    with contextlib.ExitStack() as stack:

        def hold(host: str, port: int, flag: str) -> int:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            held = stack.enter_context(socket.socket(family))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                held.bind(address)
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {host}:{port}: {error.strerror}; choose another with {flag}"
                ) from error
            bound: int = held.getsockname()[1]
            return bound

        http, server = config.http, config.server
        yield SharedPorts(
            hold(http.host, http.port, "--http.port"),
            hold(server.host, server.port, "--server.port"),
        )


def process_arguments(argv: Sequence[str], ports: SharedPorts, admin: Path) -> list[str]:
    """The command line of one process: the gateway's own with a few flags replaced.

    Args:
        admin: the admin socket of the new process, at which the parent asks it.
    """
    return [
        *argv,
        "--http.processes=1",
        f"--http.port={ports.http}",
        f"--server.port={ports.grpc}",
        "--server.share-port=true",
        "--telemetry.metrics-port=-1",  # the parent serves them, summed up
        "--server.admin.port=-1",
        f"--server.admin.socket={admin}",
    ]


def pause_s(num_young: int) -> float:
    """Seconds to wait before a process is replaced.

    Args:
        num_young: processes in a row that ended soon after their start.
    """
    return float(min(FIRST_PAUSE_S * 2**num_young, MAX_PAUSE_S))


class GatewayProcesses:
    """Keeps the processes running.

    Args:
        commands: the command lines, one per process.
        folder: the folder in which the processes share their metrics.
        stop_s: time from SIGTERM to SIGKILL.
    """

    def __init__(self, commands: Sequence[Sequence[str]], folder: Path, stop_s: float) -> None:
        self._commands = commands
        self._folder = folder
        self._stop_s = stop_s
        self._stopping = asyncio.Event()
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._code = 0

    def stop(self) -> None:
        """Drains all processes; when called again, ends them at once."""
        self._stopping.set()
        for process in self._running.values():
            ask_to_end(process)

    def pids(self) -> dict[int, int]:
        """The processes that run now, by number."""
        return {number: process.pid for number, process in self._running.items()}

    async def run(self) -> int:
        """Runs until `stop` was called and all processes ended; 0 if all of them drained well."""
        await asyncio.gather(*(self._keep(number) for number in range(len(self._commands))))
        return self._code

    async def _keep(self, number: int) -> None:
        num_young = 0
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            started_at = loop.time()
            code = await self._run_one(number)
            if self._stopping.is_set():
                self._code = self._code or code
                return
            if code == _BAD_CONFIG:  # it has logged the reason, and would fail again
                self._code = code
                self.stop()
                return
            num_young = num_young + 1 if loop.time() - started_at < YOUNG_S else 0
            log.warning("gateway_process_ended", number=number, code=code)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s(num_young)):
                    await self._stopping.wait()

    async def _run_one(self, number: int) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._commands[number],
            stdin=asyncio.subprocess.DEVNULL,
            env=child_environment(
                {SHARED_FOLDER_VARIABLE: str(self._folder), PARENT_VARIABLE: str(os.getpid())}
            ),
            # The parent gets a Ctrl-C at the terminal, and passes it on.
            start_new_session=True,
        )
        self._running[number] = process
        if self._stopping.is_set():  # `stop` was called during the start
            ask_to_end(process)
        log.info("gateway_process_started", number=number, pid=process.pid)
        watching = (
            asyncio.create_task(self._kill_late(process)),
            asyncio.create_task(self._kill_hung(number, process)),
        )
        try:
            code = await process.wait()
            if code == -signal.SIGTERM and self._stopping.is_set():
                return 0  # it was still starting, and had nothing to drain
            return code
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            del self._running[number]
            # Removes its gauges, but not its counters.
            mark_process_dead(process.pid, str(self._folder))  # type: ignore[no-untyped-call]

    async def _kill_late(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        await asyncio.sleep(self._stop_s)
        log.warning("gateway_process_killed", pid=process.pid)
        kill(process)

    async def _kill_hung(self, number: int, process: asyncio.subprocess.Process) -> None:
        ask = partial(answers_health, admin_socket(self._folder, number))
        reason = "no answer"
        try:
            async with asyncio.timeout(START_S):
                await _until_answered(ask)
        except TimeoutError:
            reason = f"did not serve within {START_S:g} s"
        else:
            log.info("gateway_process_ready", number=number, pid=process.pid)
            await until_silent(process.pid, ask)
        log.warning("gateway_process_hung", number=number, pid=process.pid, reason=reason)
        kill(process)


async def _until_answered(ask: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await ask():
            return
        await asyncio.sleep(_POLL_S)


async def answers_health(admin: Path) -> bool:
    """Waits, without limit, for an answer of the process with this admin socket.

    Returns:
        False if no process listens there.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(admin))
    except OSError:
        return False
    try:
        writer.write(_HEALTH)
        return bool(await reader.readline())
    except OSError:
        return False
    finally:
        writer.close()


def run_processes(config: GatewayConfig, argv: Sequence[str]) -> int:
    """Runs the gateway as `http.processes` processes.

    Args:
        argv: the command line from which `config` was read.

    Returns:
        0 if all processes drained, else the exit code of one that did not; for a signal, the code
            that a shell gives.

    Raises:
        ConfigError: a port is taken.
    """
    gc.enable()  # see `kvmesh.core.loading`
    leave_when_terminated()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(shared_folder())
        ports = stack.enter_context(held_ports(config))
        if config.telemetry.metrics_port >= 0:
            address = (config.server.host, config.telemetry.metrics_port)
            stack.enter_context(metrics_server(*address, shared_registry(folder)))
        base = [sys.executable, "-m", "services.gateway"]
        commands = [
            [*base, *process_arguments(argv, ports, admin_socket(folder, number))]
            for number in range(config.http.processes)
        ]
        stop_s = config.server.drain_s + STOP_GRACE_S
        code = asyncio.run(_main(config, GatewayProcesses(commands, folder, stop_s), folder))
        return code if code >= 0 else 128 - code


async def _main(config: GatewayConfig, processes: GatewayProcesses, folder: Path) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, processes.stop)
    async with contextlib.AsyncExitStack() as stack:
        if config.server.admin.port >= 0:
            await _open_admin(config, processes, folder, stack)
        return await processes.run()


async def _open_admin(
    config: GatewayConfig,
    processes: GatewayProcesses,
    folder: Path,
    stack: contextlib.AsyncExitStack,
) -> None:
    sockets = await ProcessSockets.open(folder, config.http.processes, stack)
    requests = AllRequests(sockets, processes.pids)
    admin, work = process_admin(config, sockets, requests, folder, processes.stop)
    for name, each in work.items():
        task = asyncio.create_task(each, name=name)
        task.add_done_callback(lambda ended: _note_end(ended, processes))
        stack.callback(task.cancel)
    stack.push_async_callback(admin.close)
    await admin.start()


def _note_end(task: asyncio.Task[None], processes: GatewayProcesses) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.failure("background_task_failed", error)
        processes.stop()
