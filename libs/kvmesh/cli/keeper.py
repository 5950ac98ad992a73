"""Keeps one process of a stack running: starts it, waits until it serves, detects its end or hang,
and restarts it.

Each process has its own keeper and task, so that none waits for another's backoff.

- A process is *serving* once its gRPC health (Redis: PING) answers; until then only the start
  limit applies. From then on it is checked every second, and killed with its process group when
  it hangs (`kvmesh.core.silence` has the rule).
- The first start is not repeated: the cause of an end before serving is usually a wrong
  configuration.
- A process that ends with exit code 2 has a wrong configuration, and is not restarted unless its
  port was taken.
- All other processes are restarted, first at once, then after pauses that double up to
  `MAX_PAUSE_S` (control plane and gateway) or `MAX_WORKER_PAUSE_S`. After `STEADY_S` of health a
  new series begins.

Tests: tests/unit/cli/test_keeper.py, tests/unit/cli/test_launcher.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import psutil

from kvmesh.cli.probes import Probe, Pulse, Readiness, readiness
from kvmesh.cli.processes import Exit, Supervisor, log_tail
from kvmesh.cli.stack import Member
from kvmesh.core.clock import Clock
from kvmesh.core.silence import SILENT_S, until_silent

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 2.0
MAX_WORKER_PAUSE_S = 30.0
STEADY_S = 10.0
"""Seconds of readiness after which a new series of restarts begins."""

WRONG_CONFIG = 2
"""Exit code of a service that cannot start as configured."""

TAIL_LINES = 15
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a process.

    Attributes:
        text: description of what happened, without a full stop.
        ended: exit code or signal.
        num_in_a_row: number of ends without `STEADY_S` of health between them, this one included.
        pause_s: seconds until the restart; None: it is not restarted.
    """

    text: str
    ended: Exit
    num_in_a_row: int
    pause_s: float | None


class Observer(Protocol):
    """Callbacks for the events of a process, by name."""

    def started(self, name: str) -> None:
        """Called when the process was started."""

    def ready(self, name: str) -> None:
        """Called when it is ready for work, for the first time since its start."""

    def steady(self, name: str) -> None:
        """Called when it has lived for `STEADY_S` after that."""

    def died(self, name: str, death: Death) -> None:
        """Called when it has ended."""


def restart_pause_s(num_in_a_row: int, max_s: float) -> float:
    """Returns the seconds from an end to the restart.

    Args:
        num_in_a_row: number of ends in the series, at least 1; there is no pause after the first.
        max_s: the longest pause in seconds.
    """
    if num_in_a_row <= 1:
        return 0.0
    return float(min(max_s, FIRST_PAUSE_S * 2 ** min(num_in_a_row - 2, 30)))


def says_port_taken(member: Member) -> bool:
    """Whether the last lines of its log say that another program has taken its port."""
    return any("is taken" in line for line in log_tail(member.spec.log_path, TAIL_LINES))


class Keeper:
    """Keeps one member running.

    Args:
        start_limit_s: maximum seconds of every start except the first, which the launcher limits.
        restart: whether to restart it after its end.
    """

    def __init__(
        self,
        member: Member,
        supervisor: Supervisor,
        observer: Observer,
        clock: Clock,
        *,
        restart: bool,
        start_limit_s: float,
    ) -> None:
        self._member = member
        self._name = member.spec.name
        self._supervisor = supervisor
        self._observer = observer
        self._clock = clock
        self._restart = restart
        self._start_limit_s = start_limit_s
        self._max_pause_s = MAX_WORKER_PAUSE_S if member.is_worker else MAX_PAUSE_S
        self._has_served = False
        self._ready_at: float | None = None
        self._reason = ""

    @property
    def is_ready(self) -> bool:
        """Whether it was ready for work since its last start."""
        return self._ready_at is not None

    @property
    def has_served(self) -> bool:
        """Whether it has ever served, in this or an earlier start."""
        return self._has_served

    @property
    def reason(self) -> str:
        """Its own reason for not being ready; empty if it gives none."""
        return self._reason

    async def run(self) -> Death:
        """Keeps the member running until it is given up; returns its last end."""
        num_in_a_row = 0
        while True:
            text, ended, healthy_s = await self._live()
            num_in_a_row = 1 if healthy_s >= STEADY_S else num_in_a_row + 1
            pause_s = self._pause_s(ended, num_in_a_row)
            death = Death(text, ended, num_in_a_row, pause_s)
            self._observer.died(self._name, death)
            if pause_s is None:
                return death
            await asyncio.sleep(pause_s)

    def _pause_s(self, ended: Exit, num_in_a_row: int) -> float | None:
        if not self._restart or not self._has_served:
            return None
        if ended.code == WRONG_CONFIG and not says_port_taken(self._member):
            return None
        return restart_pause_s(num_in_a_row, self._max_pause_s)

    async def _live(self) -> tuple[str, Exit, float]:
        """Runs the process once; returns a text about its end, the end, and its ready seconds."""
        self._ready_at, self._reason = None, ""
        pid = await self._supervisor.start(self._member.spec)
        self._observer.started(self._name)
        ending = asyncio.ensure_future(self._supervisor.ended(self._name))
        watching = asyncio.ensure_future(self._watch(pid))
        try:
            await asyncio.wait((ending, watching), return_when=asyncio.FIRST_COMPLETED)
            text = "" if ending.done() else watching.result()
            if text:
                self._supervisor.kill(self._name)
            ended = await ending
        finally:
            for task in (ending, watching):
                task.cancel()
            await asyncio.gather(ending, watching, return_exceptions=True)
        healthy_s = 0.0 if self._ready_at is None else self._clock.now() - self._ready_at
        self._ready_at = None
        return text or str(ended), ended, healthy_s

    async def _watch(self, pid: int) -> str:
        """Waits until the process must be killed; returns the reason."""
        limit_s = self._start_limit_s if self._has_served else None
        try:
            async with asyncio.timeout(limit_s):
                await _until_ready(self._member.liveness)
        except TimeoutError:
            return f"{self._name} did not serve within {limit_s:g} s of its start and was killed"
        self._has_served = True
        silent_s = _silent_s(pid)
        pulse = Pulse(self._member.liveness)
        readying = asyncio.ensure_future(self._becomes_ready())
        try:
            await until_silent(pid, pulse.beat, silent_s)
        finally:
            readying.cancel()
            await asyncio.gather(readying, return_exceptions=True)
            await pulse.close()
        return f"{self._name} gave no answer for {silent_s:g} s and was killed"

    async def _becomes_ready(self) -> None:
        await _until_ready(self._member.probe, self._note)
        self._ready_at = self._clock.now()
        self._observer.ready(self._name)
        await asyncio.sleep(STEADY_S)
        self._observer.steady(self._name)

    def _note(self, answer: Readiness) -> None:
        self._reason = answer.reason


def _silent_s(pid: int) -> float:
    """Returns the seconds without an answer after which a process hangs.

    A gateway with several processes replaces its own children. A check may have gone to a hanging
    child, so the parent gets twice the time.
    """
    try:
        return 2 * SILENT_S if psutil.Process(pid).children() else SILENT_S
    except psutil.NoSuchProcess:
        return SILENT_S


async def _until_ready(probe: Probe, note: Callable[[Readiness], None] = lambda _: None) -> None:
    while True:
        answer = await readiness(probe)
        note(answer)
        if answer.ready:
            return
        await asyncio.sleep(_POLL_S)
