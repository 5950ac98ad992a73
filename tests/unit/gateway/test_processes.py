"""Processes of one gateway: their ports, their command lines, and who is started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.core.config import load_config
from kvmesh.core.errors import ConfigError
from kvmesh.runtime.app import ServerConfig
from services.gateway.config import GatewayConfig, HttpConfig
from services.gateway.processes import (
    MAX_PAUSE_S,
    GatewayProcesses,
    SharedPorts,
    held_ports,
    pause_s,
    process_arguments,
)
from tests.waiting import until

FREE = GatewayConfig(http=HttpConfig(port=0), server=ServerConfig(port=0))
APPEND = "import sys; open(sys.argv[1], 'a').write('x')"


def _listening(port: int, *, share: bool) -> socket.socket:
    sock = socket.socket()
    if share:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    sock.listen()
    return sock


def test_held_ports_are_for_those_that_share() -> None:
    with held_ports(FREE) as ports:
        assert ports.http != ports.grpc
        with pytest.raises(OSError, match="in use"):
            _listening(ports.http, share=False)
        with _listening(ports.http, share=True), _listening(ports.http, share=True):
            # Connections go to those that listen, never to the one that only holds the port.
            for _ in range(8):
                socket.create_connection(("127.0.0.1", ports.http), timeout=5).close()


def test_a_port_of_somebody_else_is_a_config_error() -> None:
    with _listening(0, share=False) as sock:
        taken = replace(FREE, http=HttpConfig(port=sock.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"--http\.port"), held_ports(taken):
            pass


def test_a_process_is_configured_like_the_gateway_but_for_its_place() -> None:
    argv = ["--http.port=0", "--http.processes=3", "--server.admin.port=7", "--limits.max-stop=5"]
    first, second = (
        load_config(GatewayConfig, process_arguments(argv, SharedPorts(8000, 9000), Path(name)))
        for name in ("a.sock", "b.sock")
    )
    assert (first.http.port, first.server.port, first.http.processes) == (8000, 9000, 1)
    assert first.server.share_port
    # The port of all of them is where the process that started them is.
    assert first.server.admin.port == second.server.admin.port == -1
    assert (first.server.admin.socket, second.server.admin.socket) == ("a.sock", "b.sock")
    assert first.limits == second.limits
    assert first.limits.max_stop == 5


def test_pauses_grow_to_a_limit() -> None:
    pauses = [pause_s(number) for number in range(20)]
    assert pauses == sorted(pauses)
    assert pauses[0] < 1 < pauses[-1] == MAX_PAUSE_S


async def test_a_process_that_ends_is_replaced_until_it_is_told_to_stop(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    command = [sys.executable, "-c", APPEND, str(marks)]
    processes = GatewayProcesses([command], tmp_path, stop_s=30)
    running = asyncio.create_task(processes.run())
    await until(lambda: marks.exists() and len(marks.read_text()) >= 2, "it was started again")
    processes.stop()
    await running


async def test_a_process_with_a_bad_config_ends_all(tmp_path: Path) -> None:
    bad = [sys.executable, "-c", "raise SystemExit(2)"]
    good = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert await GatewayProcesses([good, bad], tmp_path, stop_s=30).run() == 2


async def test_a_process_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    deaf = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    processes = GatewayProcesses([[sys.executable, "-c", deaf, str(ready)]], tmp_path, stop_s=0.1)
    running = asyncio.create_task(processes.run())
    await until(ready.exists)
    processes.stop()
    assert await running == -9


async def test_a_process_that_is_stopped_before_it_serves_ends_well(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    starting = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
    command = [sys.executable, "-c", starting, str(ready)]
    processes = GatewayProcesses([command], tmp_path, stop_s=30)
    running = asyncio.create_task(processes.run())
    await until(ready.exists)
    processes.stop()
    assert await running == 0


async def test_a_stop_reaches_a_process_that_is_being_started(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    processes = GatewayProcesses([command], tmp_path, stop_s=1000)
    running = asyncio.create_task(processes.run())
    await asyncio.sleep(0)  # its start has begun
    assert not processes.pids()
    processes.stop()
    async with asyncio.timeout(30):
        assert await running == 0


# Answers its admin socket until it is stopped.
SERVING = """
import os, pathlib, socketserver, sys
folder = pathlib.Path(sys.argv[1])
path = folder / "admin-0.sock"
path.unlink(missing_ok=True)
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        if self.rfile.readline():
            self.wfile.write(b"HTTP/1.1 200 OK\\r\\n")
            with open(folder / "answers", "a") as file:
                print(os.getpid(), file=file)
socketserver.UnixStreamServer(str(path), Handler).serve_forever()
"""


async def test_a_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    processes = GatewayProcesses([[sys.executable, "-c", SERVING, str(tmp_path)]], tmp_path, 30)
    running = asyncio.create_task(processes.run())
    answers = tmp_path / "answers"
    await until(answers.exists)
    hung = processes.pids()[0]
    os.kill(hung, signal.SIGSTOP)
    await until(lambda: answers.read_text().split()[-1] != str(hung), "its successor answers")
    processes.stop()
    assert await running == 0


async def test_a_process_that_never_serves_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.processes.START_S", 0.5)
    marks = tmp_path / "marks"
    command = [sys.executable, "-c", f"{APPEND}; import signal; signal.pause()", str(marks)]
    processes = GatewayProcesses([command], tmp_path, stop_s=30)
    running = asyncio.create_task(processes.run())
    await until(lambda: marks.exists() and len(marks.read_text()) >= 2, "it was started again")
    processes.stop()
    assert await running == 0
