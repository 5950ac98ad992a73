"""Runs a planned stack: start in order, watch, restart or give up, stop in order.

Tests: tests/unit/cli/test_launcher.py.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console

from kvmesh.cli.probes import is_ready
from kvmesh.cli.processes import Exit, Supervisor, log_tail
from kvmesh.cli.ready_command import run_command
from kvmesh.cli.stack import Member, StackPaths, StackPlan
from kvmesh.cli.stack_display import StackDisplay, State
from kvmesh.cli.stack_state import remove_description, write_description
from kvmesh.core.clock import Clock

ResultT = TypeVar("ResultT")

FAILED = 1
PORT_TAKEN = 75
"""A process found its port taken by another program; a new plan may succeed."""

INTERRUPTED = 130
"""Stopped from outside before it was ready, or before its command had ended."""

API_KEY = "KVMESH_API_KEY"
"""Where the commands of the SDK take their key from."""

_POLL_S = 0.25
_TAIL_LINES = 15
_STEADY_S = 60.0


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """How to run a stack.

    Attributes:
        restart: start processes again that end by themselves.
        start_timeout_s: longest time until all processes are ready.
        command: run when the stack is ready; its end ends the stack. Empty: none.
        has_keys: the gateway asks its callers for a key.
    """

    restart: bool = False
    start_timeout_s: float = 120.0
    command: tuple[str, ...] = ()
    has_keys: bool = False


@dataclass(frozen=True, slots=True)
class _Stopped:
    """Somebody asked the stack to stop."""


def restart_delay_s(num_restarts: int) -> float:
    """Seconds to wait before a process is started again."""
    return float(min(30.0, 0.5 * 2**num_restarts))


class Launcher:
    """One stack from start to stop."""

    def __init__(
        self,
        plan: StackPlan,
        paths: StackPaths,
        supervisor: Supervisor,
        console: Console,
        settings: LaunchSettings,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._paths = paths
        self._supervisor = supervisor
        self._console = console
        self._settings = settings
        self._clock = clock
        self._members = {member.spec.name: member for member in plan.members}
        self._display = StackDisplay(
            console, {name: member.probe.endpoint for name, member in self._members.items()}
        )
        self._started_s: dict[str, float] = {}
        self._num_restarts: dict[str, int] = {}
        self._restarted: dict[str, Member] = {}

    async def run(self, stop: asyncio.Event) -> int:
        """Runs until `stop` is set, a process fails or the command ends; returns the exit code."""
        try:
            code = await self._bring_up(stop)
            if code is None:
                self._greet()
                code = await self._keep_up(stop)
            return code
        finally:
            if self._supervisor.pids:
                self._console.print("stopping", highlight=False)
            await self._supervisor.stop()
            remove_description(self._paths.state)

    async def _bring_up(self, stop: asyncio.Event) -> int | None:
        """Starts everything; None if it is ready, else the exit code."""
        with self._display:
            outcome = await self._race(self._start_all(), stop)
        if isinstance(outcome, Exit):
            return self._failed_start(outcome)
        if isinstance(outcome, _Stopped):
            self._console.print("stopped before it was ready", highlight=False)
            return INTERRUPTED
        if outcome:
            names = ", ".join(outcome)
            self._console.print(f"not ready in time: {names}", style="bold red", highlight=False)
            for name in outcome:
                self._show_log(name)
            return FAILED
        return None

    async def _start_all(self) -> list[str]:
        """Starts all members and waits for them; returns those that were not ready in time."""
        deadline = self._clock.now() + self._settings.start_timeout_s
        waiting: dict[str, Member] = {}
        for member in self._plan.members:
            await self._start(member)
            waiting[member.spec.name] = member
            if member.probe.kind == "redis":  # everybody else asks for it at once
                await self._wait_for(waiting, deadline)
        self._describe()
        await self._wait_for(waiting, deadline)
        return list(waiting)

    async def _start(self, member: Member) -> None:
        name = member.spec.name
        self._started_s[name] = self._clock.now()
        self._display.set_state(name, State.STARTING, self._clock.now())
        await self._supervisor.start(member.spec)

    async def _wait_for(self, waiting: dict[str, Member], deadline: float) -> None:
        """Removes members from `waiting` as they become ready, until the deadline."""
        while waiting and self._clock.now() < deadline:
            names = list(waiting)
            answers = await asyncio.gather(*(is_ready(waiting[name].probe) for name in names))
            for name, ready in zip(names, answers, strict=True):
                if ready:
                    del waiting[name]
                    self._display.set_state(name, State.READY, self._clock.now())
            self._display.refresh(self._clock.now())
            if waiting:
                await asyncio.sleep(_POLL_S)

    async def _keep_up(self, stop: asyncio.Event) -> int:
        down: list[str] = []
        while True:
            work: Coroutine[Any, Any, int | None]
            work = self._restart(down) if down else self._serve()
            outcome = await self._race(work, stop)
            if isinstance(outcome, _Stopped):
                return INTERRUPTED if self._settings.command else 0
            if isinstance(outcome, Exit):
                self._report(outcome)
                if not self._settings.restart:
                    text = "the stack ends with it; with --restart it would be started again"
                    self._console.print(text, highlight=False)
                    return FAILED
                down.append(outcome.name)
            elif outcome is not None:
                return outcome

    async def _serve(self) -> int:
        """Runs the command, or waits without end and tells who is back."""
        if not self._settings.command:
            await self._wait_for(self._restarted, math.inf)
            await asyncio.Event().wait()
        return await run_command(
            self._settings.command,
            {
                "KVMESH_URL": f"http://{self._plan.http}",
                "KVMESH_TARGET": str(self._plan.grpc),
                "KVMESH_CONSOLE": f"http://{self._plan.console}/console",
                "KVMESH_STATE_DIR": str(self._paths.state),
            },
        )

    async def _restart(self, down: list[str]) -> None:
        """Starts ended members again, each after its delay."""
        while down:
            name = down[0]
            if self._clock.now() - self._started_s[name] > _STEADY_S:
                self._num_restarts[name] = 0
            num_restarts = self._num_restarts.get(name, 0)
            await asyncio.sleep(restart_delay_s(num_restarts))
            self._num_restarts[name] = num_restarts + 1
            await self._start(self._members[down.pop(0)])
            self._restarted[name] = self._members[name]
            self._describe()

    async def _race(
        self, work: Coroutine[Any, Any, ResultT], stop: asyncio.Event
    ) -> Exit | _Stopped | ResultT:
        """Result of `work`, unless a process ends or somebody asks to stop before."""
        ended = asyncio.create_task(self._supervisor.next_exit())
        stopping = asyncio.create_task(stop.wait())
        working = asyncio.create_task(work)
        tasks = (ended, stopping, working)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return _Stopped()
            return ended.result() if ended.done() else working.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _failed_start(self, ended: Exit) -> int:
        self._report(ended)
        lines = log_tail(self._members[ended.name].spec.log_path, _TAIL_LINES)
        return PORT_TAKEN if any("is taken" in line for line in lines) else FAILED

    def _report(self, ended: Exit) -> None:
        self._display.set_state(ended.name, State.FAILED, self._clock.now())
        self._console.print(str(ended), style="bold red", highlight=False)
        self._show_log(ended.name)

    def _show_log(self, name: str) -> None:
        path = self._members[name].spec.log_path
        self._console.print(f"last lines of {path}:", markup=False, highlight=False, soft_wrap=True)
        for line in log_tail(path, _TAIL_LINES):
            self._console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)

    def _describe(self) -> None:
        """Tells other commands what runs where."""
        pids = self._supervisor.pids
        stack = {
            "http": str(self._plan.http),
            "grpc": str(self._plan.grpc),
            "console": "" if self._plan.console is None else str(self._plan.console),
            "pool": "" if self._plan.pool is None else str(self._plan.pool),
            "members": [
                {
                    "name": name,
                    "pid": pids.get(name, 0),
                    "kind": member.probe.kind,
                    "address": str(member.probe.endpoint),
                    "metrics_port": member.metrics_port,
                }
                for name, member in self._members.items()
            ],
        }
        try:
            write_description(self._paths.state, stack)
        except OSError as error:  # a full disk: no reason to stop what serves
            text = f"{self._paths.state}: {error.strerror}; other commands do not find this stack"
            self._console.print(text, style="yellow", highlight=False, soft_wrap=True)

    def _greet(self) -> None:
        url = f"http://{self._plan.http}"
        body: dict[str, object] = {"model": self._plan.model_name}
        if self._plan.has_chat:
            path = "chat/completions"
            question = "What does os.path.join do?"
            body |= {"messages": [{"role": "user", "content": question}], "temperature": 0}
        else:
            path = "completions"
            body["prompt"] = "The module"
        body |= {"max_tokens": 80, "stream": True}
        curl = f"curl -N {url}/v1/{path} -H 'content-type: application/json'"
        hint = ""
        if self._settings.has_keys:
            curl += f' -H "authorization: Bearer ${API_KEY}"'
            hint = f"key: export {API_KEY}=one of yours first; kvmesh chat and bench read it too"
        lines = (
            "",
            f"ready: {url}  (OpenAI API; gRPC {self._plan.grpc})",
            "",
            f"  {curl} -d '{json.dumps(body)}'",
            "",
            *([hint] if hint else []),
            *([f"console: http://{self._plan.console}/console"] if self._plan.console else []),
            f"logs: {self._paths.logs}/<process>.log",
            "stop: Ctrl-C",
        )
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
