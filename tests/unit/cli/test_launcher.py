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
    LaunchSettings,
    StackRunner,
)
from kvmesh.cli.probes import Probe, free_ports
from kvmesh.cli.processes import ProcessSpec, Supervisor
from kvmesh.cli.stack import Member, StackPaths, StackPlan
from kvmesh.core.clock import SystemClock
from kvmesh.core.launch import LaunchSpec
from kvmesh.core.types import Endpoint, Role
from tests.waiting import until

# A service that answers PING as Redis does, and writes a line for each life. `begin` and `serve`
# are what it does first and for each question.
SERVICE = """
import os, pathlib, socketserver, sys
marks = pathlib.Path("marks-" + sys.argv[1])
lives = len(marks.read_text()) if marks.exists() else 0
marks.write_text("x" * (lives + 1))
print("a life", flush=True)
{begin}
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        if self.rfile.readline():
            {serve}
            self.wfile.write(b"+PONG\\r\\n")
class Server(socketserver.TCPServer):
    allow_reuse_address = True
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def service(begin: str = "", serve: str = "pass") -> str:
    return SERVICE.format(begin=begin, serve=serve)


NEVER_READY = "import signal; signal.pause()"
# Ends when it is asked for the second time, in another way.
DEAF = """
import signal
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("asked").touch())
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
"""
PORT_IS_TAKEN = "import sys; print('metrics port 5 is taken; choose another'); sys.exit(2)"


@dataclass
class Stack:
    """A launcher with its surroundings."""

    folder: Path
    settings: LaunchSettings = field(default_factory=LaunchSettings)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    output: io.StringIO = field(default_factory=io.StringIO)
    supervisor: Supervisor = field(default_factory=lambda: Supervisor(grace_s=30))
    runner: StackRunner = field(init=False)

    def launch(self, **programs: str) -> asyncio.Task[int]:
        ports = free_ports("127.0.0.1", len(programs))
        members = tuple(
            self._member(name, code, Endpoint("127.0.0.1", port))
            for (name, code), port in zip(programs.items(), ports, strict=True)
        )
        plan = StackPlan(members, members[-1].probe.endpoint, Endpoint("127.0.0.1", 1), "m")
        paths = StackPaths(self.folder, self.folder, Path(sys.executable), None)
        console = Console(file=self.output, width=200)
        self.runner = StackRunner(
            plan, paths, self.supervisor, console, self.settings, SystemClock()
        )
        return asyncio.create_task(self.runner.run(self.stop))

    def _member(self, name: str, code: str, endpoint: Endpoint) -> Member:
        spec = ProcessSpec(
            name=name,
            argv=(sys.executable, "-c", code, str(endpoint.port)),
            cwd=self.folder,
            log_path=self.folder / "logs" / f"{name}.log",
            env=dict(os.environ),
        )
        probe = Probe("redis", endpoint)
        launch = LaunchSpec(Role.DECODE) if name.startswith("worker") else None
        return Member(spec, probe, probe, launch=launch)

    async def until_said(self, text: str) -> None:
        await until(lambda: text in self.output.getvalue(), f"it says {text!r}")

    def description(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return found


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path)
    yield stack
    stack.supervisor.hurry()
    await stack.supervisor.stop()


async def test_up_and_down(stack: Stack) -> None:
    running = stack.launch(a=service(), b=service())
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
    running = stack.launch(a=service(), b=NEVER_READY)
    await stack.until_said("a            ready")
    stack.stop.set()
    assert await running == INTERRUPTED
    assert "stopped before it was ready" in stack.output.getvalue()
    assert stack.supervisor.pids == {}


async def test_the_line_to_try_has_a_key_where_keys_are_asked_for(stack: Stack) -> None:
    stack.settings = LaunchSettings(has_keys=True)
    running = stack.launch(a=service())
    await stack.until_said("stop: Ctrl-C")
    said = stack.output.getvalue()
    assert '-H "authorization: Bearer $KVMESH_API_KEY"' in said
    assert "export KVMESH_API_KEY" in said
    stack.stop.set()
    assert await running == 0


async def test_a_stack_serves_where_its_description_cannot_be_written(stack: Stack) -> None:
    (stack.folder / "stack.json.new").symlink_to("/dev/full")  # as a full disk
    running = stack.launch(a=service())
    await stack.until_said("stop: Ctrl-C")
    assert "No space left" in stack.output.getvalue()
    stack.stop.set()
    assert await running == 0


async def test_a_process_that_cannot_start(stack: Stack) -> None:
    code = await stack.launch(a=service(), b="raise SystemExit('no such thing')")
    assert code == FAILED
    said = stack.output.getvalue()
    assert "b ended with exit code 1" in said
    assert "  no such thing" in said
    assert stack.supervisor.pids == {}


async def test_a_port_that_was_taken_meanwhile(stack: Stack) -> None:
    assert await stack.launch(a=service(), b=PORT_IS_TAKEN) == PORT_TAKEN


async def test_not_ready_in_time(stack: Stack) -> None:
    stack.settings = LaunchSettings(start_timeout_s=0.1)
    said = "import signal; print('12:00:00 INFO a reading 7 files', flush=True); signal.pause()"
    assert await stack.launch(a=said) == FAILED
    assert "not ready in time (0.1 s; --start-timeout): a (" in stack.output.getvalue()
    assert stack.supervisor.pids == {}


async def test_a_starting_process_is_shown_with_the_end_of_its_log(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.cli.launcher.PROGRESS_S", 0.1)
    code = "import signal; print('12:00:00 INFO a reading 7 files', flush=True); signal.pause()"
    running = stack.launch(a=code, b=code, c="import signal; signal.pause()")
    await stack.until_said("a, b (reading 7 files); c (loading modules)")
    stack.stop.set()
    assert await running == INTERRUPTED


async def test_a_worker_let_go_ends_and_keeps_its_name_until_then(stack: Stack) -> None:
    running = stack.launch(a=service(), worker=service(begin=DEAF))
    await stack.until_said("stop: Ctrl-C")
    pid = stack.supervisor.pids["worker"]
    asking = asyncio.ensure_future(stack.runner.let_go("worker"))
    await until((stack.folder / "asked").exists, "the worker is asked to end")
    assert "worker" not in stack.runner.members
    assert "worker" in stack.runner.names
    asking.cancel()  # who asked has died: the worker ends all the same
    os.kill(pid, signal.SIGUSR1)
    await until(lambda: "worker" not in stack.runner.names, "the worker has ended")
    await until(
        lambda: [member["name"] for member in stack.description()["members"]] == ["a"],
        "others are told that it has gone",
    )
    stack.stop.set()
    assert await running == 0


async def test_a_death_ends_a_stack_without_restarts(stack: Stack) -> None:
    stack.settings = LaunchSettings(restart=False)
    running = stack.launch(a=service(), b=service())
    await stack.until_said("stop: Ctrl-C")
    os.kill(stack.supervisor.pids["a"], signal.SIGKILL)
    assert await running == FAILED
    assert "a was killed by SIGKILL" in stack.output.getvalue()
    assert "nothing is restarted with --no-restart" in stack.output.getvalue()
    assert "  a life" in stack.output.getvalue()


async def test_what_dies_is_started_again(stack: Stack) -> None:
    running = stack.launch(a=service(), b=service())
    await stack.until_said("stop: Ctrl-C")
    before = stack.supervisor.pids
    os.kill(before["a"], signal.SIGKILL)
    await stack.until_said("a was killed by SIGKILL; restarting it")
    await stack.until_said("a            ready again")
    after = stack.supervisor.pids
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]
    assert stack.description()["members"][0]["pid"] == after["a"]
    stack.stop.set()
    assert await running == 0


async def test_nobody_waits_for_one_that_backs_off(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.cli.keeper.FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr("kvmesh.cli.keeper.MAX_WORKER_PAUSE_S", 1000.0)
    ends_later = service(begin="if lives: sys.exit(1)")
    running = stack.launch(worker=ends_later, a=service(), b=service())
    await stack.until_said("stop: Ctrl-C")
    before = stack.supervisor.pids
    os.kill(before["worker"], signal.SIGKILL)
    await until(lambda: _lives(stack, "worker") == 2 and "worker" not in stack.supervisor.pids)
    for name in ("a", "b"):
        os.kill(before[name], signal.SIGKILL)
    await stack.until_said("a            ready again")
    await stack.until_said("b            ready again")
    assert "worker" not in stack.supervisor.pids
    stack.stop.set()
    assert await running == 0


async def test_one_that_ends_over_and_over_is_reported_once_a_minute(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmesh.cli.keeper.MAX_PAUSE_S", 0.01)
    running = stack.launch(a=service(begin="if 0 < lives < 6: sys.exit('oh no')"))
    await stack.until_said("stop: Ctrl-C")
    os.kill(stack.supervisor.pids["a"], signal.SIGKILL)
    await until(lambda: _lives(stack, "a") == 7)
    await stack.until_said("a was killed by SIGKILL; restarting it")
    await stack.until_said("a ended with exit code 1, 2 times in a row; restarting it every 0.01 s")
    assert stack.output.getvalue().count("restarting it") == 2
    for number in (7, 8):
        await until(lambda: "a" in stack.supervisor.pids)
        os.kill(stack.supervisor.pids["a"], signal.SIGKILL)
        await stack.until_said(f"a was killed by SIGKILL, {number} times in a row")
        monkeypatch.setattr("kvmesh.cli.launcher.SAY_AGAIN_S", 0.0)
    stack.stop.set()
    assert await running == 0


async def test_a_wrong_configuration_is_not_tried_again(stack: Stack) -> None:
    wrong_later = service(begin="if lives: print('no such model'); sys.exit(2)")
    running = stack.launch(worker0=wrong_later, worker1=wrong_later, a=service())
    await stack.until_said("stop: Ctrl-C")
    pids = stack.supervisor.pids
    os.kill(pids["worker0"], signal.SIGKILL)
    await stack.until_said("worker0 is not restarted: its configuration is wrong; the others go on")
    assert "  no such model" in stack.output.getvalue()
    os.kill(pids["worker1"], signal.SIGKILL)
    assert await running == FAILED
    assert "the stack ends with worker1" in stack.output.getvalue()


async def test_a_port_that_is_taken_is_tried_again(stack: Stack) -> None:
    taken = "if lives == 1: print('port 5 is taken; choose another', flush=True); sys.exit(2)"
    running = stack.launch(a=service(begin=taken))
    await stack.until_said("stop: Ctrl-C")
    os.kill(stack.supervisor.pids["a"], signal.SIGKILL)
    await until(lambda: _lives(stack, "a") == 3)
    stack.stop.set()
    assert await running == 0


async def test_a_process_that_hangs_is_replaced(stack: Stack) -> None:
    running = stack.launch(a=service(), b=service())
    await stack.until_said("stop: Ctrl-C")
    before = stack.supervisor.pids
    os.kill(before["a"], signal.SIGSTOP)
    await stack.until_said("a gave no answer for 3 s and was killed; restarting it")
    await stack.until_said("a            ready again")
    assert stack.supervisor.pids["b"] == before["b"]
    stack.stop.set()
    assert await running == 0


async def test_a_restarted_process_has_a_limit_to_serve(stack: Stack) -> None:
    stack.settings = LaunchSettings(start_timeout_s=5.0)
    running = stack.launch(a=service(begin="if lives == 1: import signal; signal.pause()"))
    await stack.until_said("stop: Ctrl-C")
    os.kill(stack.supervisor.pids["a"], signal.SIGKILL)
    await until(lambda: _lives(stack, "a") == 3)
    stack.stop.set()
    assert await running == 0


def _lives(stack: Stack, name: str) -> int:
    path = stack.folder / "logs" / f"{name}.log"
    return path.read_text().count("a life")


async def test_a_command_that_runs_when_all_is_ready(stack: Stack) -> None:
    code = (
        "import os, sys; e = os.environ; "
        "print(e['KVMESH_URL'], e['KVMESH_STATE_DIR'], file=open(sys.argv[1], 'w')); exit(7)"
    )
    seen = stack.folder / "seen"
    stack.settings = LaunchSettings(command=(sys.executable, "-c", code, str(seen)))
    assert await stack.launch(a=service()) == 7
    url, state = seen.read_text().split()
    assert url.startswith("http://127.0.0.1:")
    assert state == str(stack.folder)  # other commands find the stack by it


async def test_a_stop_ends_the_command(stack: Stack) -> None:
    marker = stack.folder / "marker"
    code = f"import signal, pathlib; pathlib.Path('{marker}').touch(); signal.pause()"
    stack.settings = LaunchSettings(command=(sys.executable, "-c", code))
    running = stack.launch(a=service())
    await until(marker.exists)
    stack.stop.set()
    assert await running == INTERRUPTED
