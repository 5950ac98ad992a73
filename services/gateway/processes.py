"""A gateway of several processes on one port: started, watched, replaced and stopped together.

The kernel deals connections out to them (SO_REUSEPORT). This process serves nothing itself: it
holds the ports, so that they stay the gateway's while processes come and go, and adds up metrics.
Tests: tests/e2e/test_gateway_processes.py, tests/unit/gateway/test_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from kvmesh.cli.processes import die_with_parent
from kvmesh.core.config import child_environment
from kvmesh.core.errors import ConfigError
from kvmesh.runtime.app import metrics_server
from kvmesh.telemetry.exposition import SHARED_FOLDER_VARIABLE, shared_registry
from kvmesh.telemetry.logs import event_logger
from services.gateway.config import GatewayConfig

log = event_logger(__name__)

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
"""Bounds of the pause before a process that ended is replaced; it doubles while they end young."""
YOUNG_S = 10.0
STOP_GRACE_S = 5.0
"""Time beyond its drain that a process has to end."""

_BAD_CONFIG = 2


@dataclass(frozen=True, slots=True)
class SharedPorts:
    """Ports that the processes listen on; nobody else can take them meanwhile."""

    http: int
    grpc: int


@contextlib.contextmanager
def held_ports(config: GatewayConfig) -> Iterator[SharedPorts]:
    """Takes the ports without listening on them.

    Raises:
        ConfigError: one is taken by a process that does not share it.
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


def process_arguments(argv: Sequence[str], ports: SharedPorts, number: int) -> list[str]:
    """The command line of one process: the gateway's own, and what must differ from it."""
    arguments = [
        *argv,
        "--http.processes=1",
        f"--http.port={ports.http}",
        f"--server.port={ports.grpc}",
        "--server.share-port=true",
        "--telemetry.metrics-port=-1",  # they are served here, added up
    ]
    if number > 0:  # one admin port has one owner
        arguments.append("--server.admin.port=-1")
    return arguments


def pause_s(num_young: int) -> float:
    """How long to wait before a process is replaced.

    Args:
        num_young: how many in a row ended soon after their start.
    """
    return float(min(FIRST_PAUSE_S * 2**num_young, MAX_PAUSE_S))


class GatewayProcesses:
    """Keeps the processes running.

    Args:
        commands: what to run, one per process.
        folder: where they share their metrics.
        stop_s: time from SIGTERM to SIGKILL.
    """

    def __init__(self, commands: Sequence[Sequence[str]], folder: Path, stop_s: float) -> None:
        self._commands = commands
        self._folder = folder
        self._stop_s = stop_s
        self._stopping = asyncio.Event()
        self._running: set[asyncio.subprocess.Process] = set()
        self._code = 0

    def stop(self) -> None:
        """Drains all processes; again: without patience."""
        self._stopping.set()
        for process in self._running:
            process.send_signal(signal.SIGTERM)

    async def run(self) -> int:
        """Runs until `stop` was called and all have ended; 0 if all of them drained well."""
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
            if code == _BAD_CONFIG:  # it has said why, and would say so again
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
            env=child_environment({SHARED_FOLDER_VARIABLE: str(self._folder)}),
            preexec_fn=die_with_parent(),
            # A Ctrl-C at the terminal is for this process, which passes it on.
            start_new_session=True,
        )
        self._running.add(process)
        log.info("gateway_process_started", number=number, pid=process.pid)
        kill = asyncio.create_task(self._kill_late(process))
        try:
            return await process.wait()
        finally:
            kill.cancel()
            self._running.discard(process)
            # Its counters stay, its gauges go.
            mark_process_dead(process.pid, str(self._folder))  # type: ignore[no-untyped-call]

    async def _kill_late(self, process: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        await asyncio.sleep(self._stop_s)
        log.warning("gateway_process_killed", pid=process.pid)
        process.kill()


def run_processes(config: GatewayConfig, argv: Sequence[str]) -> int:
    """Runs the gateway as `http.processes` processes; returns the exit code.

    Args:
        argv: the command line that `config` was read from.

    Raises:
        ConfigError: a port is taken.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvmesh-gateway-")))
        ports = stack.enter_context(held_ports(config))
        if config.telemetry.metrics_port >= 0:
            address = (config.server.host, config.telemetry.metrics_port)
            stack.enter_context(metrics_server(*address, shared_registry(folder)))
        base = [sys.executable, "-m", "services.gateway"]
        commands = [
            [*base, *process_arguments(argv, ports, number)]
            for number in range(config.http.processes)
        ]
        stop_s = config.server.drain_s + STOP_GRACE_S
        return asyncio.run(_main(commands, folder, stop_s))


async def _main(commands: Sequence[Sequence[str]], folder: Path, stop_s: float) -> int:
    processes = GatewayProcesses(commands, folder, stop_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, processes.stop)
    return await processes.run()
