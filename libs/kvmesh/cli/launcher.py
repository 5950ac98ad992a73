"""Runs a planned stack: starts all processes, keeps them alive or gives up, stops them in order.

Each process has a `Keeper`. This module decides whether the end of a process ends the stack, and
reports events to the user. Tests: tests/unit/cli/test_launcher.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvmesh.cli.descendants import reap_orphans
from kvmesh.cli.keeper import TAIL_LINES, Death, Keeper, says_port_taken
from kvmesh.cli.local_workers import serve_workers
from kvmesh.cli.processes import Supervisor, log_tail
from kvmesh.cli.ready_command import run_command
from kvmesh.cli.stack import Member, StackPaths, StackPlan
from kvmesh.cli.stack_display import StackDisplay, State
from kvmesh.cli.stack_greeting import greeting
from kvmesh.cli.stack_state import remove_description, write_description
from kvmesh.core.clock import Clock

FAILED = 1
PORT_TAKEN = 75
"""Exit code if another program has taken a process's port; a new plan may succeed."""

INTERRUPTED = 130
"""Exit code after a stop signal before the stack was ready or its command had ended."""

SAY_AGAIN_S = 60.0
"""Seconds between two reports about a process that ends repeatedly in the same way."""

PROGRESS_S = 10.0
"""Seconds between two lines about the start's progress, if there is no terminal."""

_POLL_S = 0.1
_EVENT_COLUMN = 3  # of a line of log: time, level, service, event


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Settings for running a stack.

    Attributes:
        restart: whether processes that end or hang are restarted.
        start_timeout_s: maximum seconds until all processes are ready, and until a restarted
            process serves.
        command: command to run when the stack is ready; its end ends the stack. Empty: none.
        has_keys: whether the gateway requires an API key.
    """

    restart: bool = True
    start_timeout_s: float = 120.0
    command: tuple[str, ...] = ()
    has_keys: bool = False


class StackRunner:
    """One stack from start to stop; the observer of its keepers.

    The scheduler also starts and ends its workers, through `LocalWorkers`.
    """

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
        self._members: dict[str, Member] = {}
        self._display = StackDisplay(console)
        self._keepers: dict[str, Keeper] = {}
        self._keeping: dict[str, asyncio.Future[Death]] = {}
        self._ending: set[asyncio.Future[None]] = set()
        self._ends = asyncio.Event()
        self._first = {member.spec.name for member in plan.members}
        self._said: dict[str, tuple[float, str]] = {}
        self._untold: set[str] = set()
        self._given_up: set[str] = set()

    async def run(self, stop: asyncio.Event) -> int:
        """Runs until `stop` is set, a process is given up or the command ends; returns exit
        code.
        """
        server = await serve_workers(self._plan, self)  # before the scheduler, its client
        stopping = asyncio.ensure_future(stop.wait())
        for member in self._plan.members:
            self.keep(member)
        try:
            code = await self._bring_up(stopping)
            if code is None:
                for line in greeting(self._plan, self._paths, has_keys=self._settings.has_keys):
                    self._say(line)
                code = await self._keep_up(stopping)
            return code
        finally:
            if server is not None:
                await server.stop(None)
            tasks: list[asyncio.Future[Any]] = [stopping, *self._keeping.values(), *self._ending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._supervisor.pids:
                self._say("stopping")
            await self._supervisor.stop()
            remove_description(self._paths.state)

    # --- processes that come and go -------------------------------------------------------------

    @property
    def members(self) -> Mapping[str, Member]:
        """See `Processes`."""
        return self._members

    def keep(self, member: Member) -> None:
        """See `Processes`."""
        name = member.spec.name
        self._members[name] = member
        self._display.add(name, member.probe.endpoint)
        keeper = self._keepers[name] = Keeper(
            member,
            self._supervisor,
            self,
            self._clock,
            restart=self._settings.restart,
            start_limit_s=self._settings.start_timeout_s,
        )
        task = self._keeping[name] = asyncio.ensure_future(keeper.run())
        task.add_done_callback(lambda _: self._ends.set())

    @property
    def names(self) -> Set[str]:
        """See `Processes`."""
        return self._members.keys() | self._supervisor.pids.keys()

    async def let_go(self, name: str) -> None:
        """See `Processes`."""
        keeping = self._keeping.pop(name)
        self._forget(name)
        # Shielded: the process is also stopped if the caller does not wait for it.
        ending = asyncio.ensure_future(self._end(name, keeping))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    async def _end(self, name: str, keeping: asyncio.Future[Death]) -> None:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if name in self._supervisor.pids:
            await self._supervisor.stop_one(name)
        self._describe()

    def _forget(self, name: str) -> None:
        del self._members[name], self._keepers[name]
        self._keeping.pop(name, None)
        self._display.remove(name)

    def kill(self, name: str) -> None:
        """See `Processes`."""
        if name in self._supervisor.pids:  # else it is about to be restarted
            self._supervisor.kill(name)

    # --- from start to stop ---------------------------------------------------------------------

    async def _bring_up(self, stopping: asyncio.Future[Any]) -> int | None:
        """Waits until all processes are ready; returns None then, else the exit code."""
        keeping = list(self._keeping.values())
        began = told = self._clock.now()
        with self._display:
            while not all(keeper.is_ready for keeper in self._keepers.values()):
                now = self._clock.now()
                if stopping.done() or any(task.done() for task in keeping):
                    break
                if now >= began + self._settings.start_timeout_s:
                    return self._too_late()
                for name, keeper in self._keepers.items():
                    self._display.set_detail(name, "" if keeper.is_ready else self._doing(name))
                self._display.refresh(now)
                if not self._console.is_terminal and now >= told + PROGRESS_S:
                    told = now
                    self._say(f"still starting after {now - began:.0f} s: {self._not_ready()}")
                await _first_of((stopping, *keeping), _POLL_S)
        for task in keeping:
            if task.done():
                return self._failed_start(task.result())
        if stopping.done():
            self._say("stopped before it was ready")
            return INTERRUPTED
        return None

    def _failed_start(self, death: Death) -> int:
        self._say("the stack ends, because its first start failed")
        taken = says_port_taken(self._members[death.ended.name])
        return PORT_TAKEN if taken else FAILED

    def _too_late(self) -> int:
        limit_s = self._settings.start_timeout_s
        text = f"not ready in time ({limit_s:g} s; --start-timeout): {self._not_ready()}"
        self._say(text, style="bold red")
        for name, keeper in self._keepers.items():
            if not keeper.is_ready:
                self._show_log(name)
        return FAILED

    def _not_ready(self) -> str:
        """Returns the processes that are not ready, grouped by their present activity."""
        waiting: dict[str, list[str]] = {}
        for name, keeper in self._keepers.items():
            if not keeper.is_ready:
                waiting.setdefault(self._doing(name), []).append(name)
        return "; ".join(f"{', '.join(names)} ({doing})" for doing, names in waiting.items())

    def _doing(self, name: str) -> str:
        """Returns a process's own reason for not being ready, else the last line of its log."""
        if reason := self._keepers[name].reason:
            return reason
        lines = log_tail(self._members[name].spec.log_path, 1)
        if not lines:
            return "loading modules"
        words = lines[0].split(None, _EVENT_COLUMN)
        return words[-1] if len(words) > _EVENT_COLUMN else lines[0]

    async def _keep_up(self, stopping: asyncio.Future[Any]) -> int:
        command = self._settings.command
        running = asyncio.ensure_future(self._run_command()) if command else None
        waiting = (stopping, *([running] if running is not None else []))
        try:
            while True:
                self._ends.clear()
                if self._has_ended():
                    return FAILED
                if running is not None and running.done():
                    return running.result()
                ends = asyncio.ensure_future(self._ends.wait())
                try:
                    await _first_of((ends, *waiting))
                finally:
                    ends.cancel()
                if stopping.done():
                    return INTERRUPTED if command else 0
        finally:
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    def _has_ended(self) -> bool:
        """Reports the processes that are given up now; returns whether the stack ends."""
        for name, task in list(self._keeping.items()):
            if task.done() and name not in self._given_up and self._ends_with(task.result()):
                return True
        return False

    async def _run_command(self) -> int:
        return await run_command(
            self._settings.command,
            {
                "KVMESH_URL": f"http://{self._plan.http}",
                "KVMESH_TARGET": str(self._plan.grpc),
                "KVMESH_CONSOLE": f"http://{self._plan.console}/console",
                "KVMESH_STATE_DIR": str(self._paths.state),
            },
        )

    def _ends_with(self, death: Death) -> bool:
        """Reports the effect of a process that is not restarted; returns whether the stack ends."""
        name = death.ended.name
        if not self._settings.restart:
            why = "--run" if self._settings.command else "--no-restart"
            self._say(f"the stack ends with it: nothing is restarted with {why}")
            return True
        if name not in self._first and not self._keepers[name].has_served:
            self._say(f"{name} is given up: its first start failed; the others go on")
            self._forget(name)
            return False
        self._given_up.add(name)
        workers = {name for name, member in self._members.items() if member.is_worker}
        if name in workers and workers - self._given_up:
            self._say(f"{name} is not restarted: its configuration is wrong; the others go on")
            return False
        self._say(f"the stack ends with {name}: its configuration is wrong")
        return True

    def started(self, name: str) -> None:
        """See `Observer`."""
        self._display.set_state(name, State.STARTING, self._clock.now())
        if len(self._supervisor.pids) == len(self._members) or name in self._said:
            self._describe()

    def ready(self, name: str) -> None:
        """See `Observer`."""
        if name not in self._untold:
            self._display.set_state(name, State.READY, self._clock.now())

    def steady(self, name: str) -> None:
        """See `Observer`."""
        if name in self._untold:
            self._untold.discard(name)
            self._display.set_state(name, State.READY, self._clock.now())

    def died(self, name: str, death: Death) -> None:
        """See `Observer`."""
        now = self._clock.now()
        reap_orphans(self._supervisor.pids.values())
        self._display.set_state(name, State.FAILED, now)
        text = death.text
        if death.pause_s is not None:
            if death.num_in_a_row > 1:
                said_at, said = self._said.get(name, (now, text))
                if said == text and now < said_at + SAY_AGAIN_S:
                    self._untold.add(name)
                    return
                text += f", {death.num_in_a_row} times in a row; restarting it every"
                text += f" {death.pause_s:.2g} s"
            else:
                text += "; restarting it"
        self._said[name] = (now, death.text)
        self._untold.discard(name)
        self._say(text, style="bold red")
        if death.ended.code >= 0 or death.pause_s is None:
            self._show_log(name)

    def _show_log(self, name: str) -> None:
        path = self._members[name].spec.log_path
        self._say(f"last lines of {path}:")
        for line in log_tail(path, TAIL_LINES):
            self._say(f"  {line}")

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _describe(self) -> None:
        """Writes the description of the running stack for other commands."""
        pids = self._supervisor.pids
        stack = {
            "http": str(self._plan.http),
            "grpc": str(self._plan.grpc),
            "console": "" if self._plan.console is None else str(self._plan.console),
            "pool": "" if self._plan.pool is None else str(self._plan.pool),
            "secret_file": self._plan.secret_file,
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
        except OSError as error:  # a full disk is no reason to stop a serving stack
            text = f"{self._paths.state}: {error.strerror}; other commands do not find this stack"
            self._say(text, style="yellow")


async def _first_of(waiting: Iterable[asyncio.Future[Any]], limit_s: float | None = None) -> None:
    await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
