from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvmesh.cli.launcher import (
    FAILED,
    INTERRUPTED,
    PORT_TAKEN,
    Launcher,
    LaunchSettings,
    restart_delay_s,
)
from kvmesh.cli.probes import Probe, free_ports
from kvmesh.cli.processes import ProcessSpec, Supervisor
from kvmesh.cli.stack import Member, StackPaths, StackPlan
from kvmesh.core.clock import SystemClock
from kvmesh.core.types import Endpoint
from tests.waiting import until

# A service that is ready as soon as it listens, and writes a line for each life.
SERVICE = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments):
        pass
print("a life", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
NEVER_READY = "import signal; signal.pause()"
PORT_IS_TAKEN = "import sys; print('metrics port 5 is taken; choose another'); sys.exit(2)"


@dataclass
class Stack:
    """A launcher with its surroundings."""

    folder: Path
    settings: LaunchSettings = field(default_factory=LaunchSettings)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    output: io.StringIO = field(default_factory=io.StringIO)
    supervisor: Supervisor = field(default_factory=lambda: Supervisor(grace_s=30))

    def launch(self, **programs: str) -> asyncio.Task[int]:
        ports = free_ports("127.0.0.1", len(programs))
        members = tuple(
            self._member(name, code, Endpoint("127.0.0.1", port))
            for (name, code), port in zip(programs.items(), ports, strict=True)
        )
        plan = StackPlan(members, members[-1].probe.endpoint, Endpoint("127.0.0.1", 1), "m")
        paths = StackPaths(self.folder, self.folder, Path(sys.executable), None)
        console = Console(file=self.output, width=200)
        launcher = Launcher(plan, paths, self.supervisor, console, self.settings, SystemClock())
        return asyncio.create_task(launcher.run(self.stop))

    def _member(self, name: str, code: str, endpoint: Endpoint) -> Member:
        spec = ProcessSpec(
            name=name,
            argv=(sys.executable, "-c", code, str(endpoint.port)),
            cwd=self.folder,
            log_path=self.folder / "logs" / f"{name}.log",
            env=dict(os.environ),
        )
        return Member(spec, Probe("http", endpoint))

    async def until_said(self, text: str) -> None:
        await until(lambda: text in self.output.getvalue(), f"it says {text!r}")

    def description(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return found


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.supervisor.kill()
    await stack.supervisor.stop()


async def test_up_and_down(stack: Stack) -> None:
    running = stack.launch(a=SERVICE, b=SERVICE)
    await stack.until_said("stop: Ctrl-C")
    said = stack.output.getvalue()
    described = stack.description()
    assert f"ready: http://{described['http']}" in said
    assert '"model": "m"' in said
    assert [member["name"] for member in described["members"]] == ["a", "b"]
    assert {m["name"]: m["pid"] for m in described["members"]} == stack.supervisor.pids
    stack.stop.set()
    assert await running == 0
    assert stack.supervisor.pids == {}
    assert not (stack.folder / "stack.json").exists()


async def test_a_stop_while_starting(stack: Stack) -> None:
    running = stack.launch(a=SERVICE, b=NEVER_READY)
    await stack.until_said("a            ready")
    stack.stop.set()
    assert await running == INTERRUPTED
    assert "stopped before it was ready" in stack.output.getvalue()
    assert stack.supervisor.pids == {}


async def test_the_line_to_try_has_a_key_where_keys_are_asked_for(stack: Stack) -> None:
    stack.settings = LaunchSettings(has_keys=True)
    running = stack.launch(a=SERVICE)
    await stack.until_said("stop: Ctrl-C")
    said = stack.output.getvalue()
    assert '-H "authorization: Bearer $KVMESH_API_KEY"' in said
    assert "export KVMESH_API_KEY" in said
    stack.stop.set()
    assert await running == 0


async def test_a_stack_serves_where_its_description_cannot_be_written(stack: Stack) -> None:
    (stack.folder / "stack.json").symlink_to("/dev/full")  # as a full disk
    running = stack.launch(a=SERVICE)
    await stack.until_said("stop: Ctrl-C")
    assert "No space left" in stack.output.getvalue()
    stack.stop.set()
    assert await running == 0


async def test_a_process_that_cannot_start(stack: Stack) -> None:
    code = await stack.launch(a=SERVICE, b="raise SystemExit('no such thing')")
    assert code == FAILED
    said = stack.output.getvalue()
    assert "b ended with exit code 1" in said
    assert "  no such thing" in said
    assert stack.supervisor.pids == {}


async def test_a_port_that_was_taken_meanwhile(stack: Stack) -> None:
    assert await stack.launch(a=SERVICE, b=PORT_IS_TAKEN) == PORT_TAKEN


async def test_not_ready_in_time(stack: Stack) -> None:
    stack.settings = LaunchSettings(start_timeout_s=0.1)
    assert await stack.launch(a=NEVER_READY) == FAILED
    assert "not ready in time: a" in stack.output.getvalue()
    assert stack.supervisor.pids == {}


async def test_a_death_ends_the_stack(stack: Stack) -> None:
    running = stack.launch(a=SERVICE, b=SERVICE)
    await stack.until_said("stop: Ctrl-C")
    os.kill(stack.supervisor.pids["a"], signal.SIGKILL)
    assert await running == FAILED
    assert "a was killed by SIGKILL" in stack.output.getvalue()
    assert "--restart" in stack.output.getvalue()
    assert "  a life" in stack.output.getvalue()


async def test_a_death_with_restart(stack: Stack) -> None:
    stack.settings = LaunchSettings(restart=True)
    running = stack.launch(a=SERVICE, b=SERVICE)
    await stack.until_said("stop: Ctrl-C")
    before = stack.supervisor.pids
    os.kill(before["a"], signal.SIGKILL)
    await stack.until_said("a was killed by SIGKILL")
    await until(lambda: stack.output.getvalue().count("a            ready") == 2)
    assert stack.supervisor.pids["a"] != before["a"]
    assert stack.supervisor.pids["b"] == before["b"]
    stack.stop.set()
    assert await running == 0


async def test_a_command_that_runs_when_all_is_ready(stack: Stack) -> None:
    code = (
        "import os, sys; e = os.environ; "
        "print(e['KVMESH_URL'], e['KVMESH_STATE_DIR'], file=open(sys.argv[1], 'w')); exit(7)"
    )
    seen = stack.folder / "seen"
    stack.settings = LaunchSettings(command=(sys.executable, "-c", code, str(seen)))
    assert await stack.launch(a=SERVICE) == 7
    url, state = seen.read_text().split()
    assert url.startswith("http://127.0.0.1:")
    assert state == str(stack.folder)  # other commands find the stack by it


async def test_a_stop_ends_the_command(stack: Stack) -> None:
    marker = stack.folder / "marker"
    code = f"import signal, pathlib; pathlib.Path('{marker}').touch(); signal.pause()"
    stack.settings = LaunchSettings(command=(sys.executable, "-c", code))
    running = stack.launch(a=SERVICE)
    await until(marker.exists)
    stack.stop.set()
    assert await running == INTERRUPTED


def test_restarts_become_rarer() -> None:
    delays = [restart_delay_s(number) for number in range(10)]
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert delays[-1] == 30.0
