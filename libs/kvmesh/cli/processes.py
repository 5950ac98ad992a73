"""Child processes that end with this one.

This module knows nothing about the programs that it runs. Each child leads its own session and
process group; processes left in the group when the child ends are killed. On Linux the kernel kills
the children with SIGKILL if this process dies without stopping them.
Tests: tests/unit/cli/test_processes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.core.children import ask_to_end

_PR_SET_PDEATHSIG = 1
_ORPHANED = 113


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Specification of a child process.

    Attributes:
        name: unique among the children of a supervisor.
        env: the whole environment.
        log_path: file for stdout and stderr; the first start overwrites it.
        stop_rank: children with a lower rank are stopped first.
    """

    name: str
    argv: tuple[str, ...]
    cwd: Path
    log_path: Path
    stop_rank: int = 0
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a child.

    Attributes:
        code: exit code, negative for a signal.
    """

    name: str
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"{self.name} ended with exit code {self.code}"
        return f"{self.name} was killed by {signal.Signals(-self.code).name}"


@dataclass(frozen=True, slots=True)
class _Child:
    spec: ProcessSpec
    process: asyncio.subprocess.Process
    watch: asyncio.Task[Exit]


def die_with_parent() -> Callable[[], None] | None:
    """Returns the function that a child calls between fork and exec to never outlive this
    process.
    """
    if sys.platform != "linux":
        return None
    # Loaded here, because as little work as possible should happen between fork and exec.
    libc = ctypes.CDLL(None, use_errno=True)
    return functools.partial(_ask_kernel, libc, os.getpid())


def end_with(parent: int) -> None:
    """Makes this process die with its parent.

    For children of a process with gRPC threads, where work between fork and exec is not safe.

    Args:
        parent: the parent's process id; if it is no longer the parent, this process ends at once.
    """
    if sys.platform == "linux":
        _ask_kernel(ctypes.CDLL(None, use_errno=True), parent)


def _ask_kernel(libc: ctypes.CDLL, parent: int) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # the parent died before the call
        os._exit(_ORPHANED)


class Supervisor:
    """Starts children, reports when one ends, and stops all of them in order."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s`: seconds between SIGTERM and SIGKILL for the children of one rank."""
        self._grace_s = grace_s
        self._children: dict[str, _Child] = {}
        self._started: set[str] = set()
        self._stopping = False
        self._killing = False

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running children, by name."""
        return {
            name: child.process.pid
            for name, child in self._children.items()
            if child.process.returncode is None
        }

    async def start(self, spec: ProcessSpec) -> int:
        """Starts a child and returns its process id.

        The name of an ended child may be started again.

        Raises:
            OSError: the program or its folder does not exist.
        """
        assert spec.name not in self.pids, f"{spec.name} runs already"
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        again = spec.name in self._started
        with spec.log_path.open("ab" if again else "wb") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                cwd=spec.cwd,
                env=dict(spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C goes to the terminal's foreground group, so not to the children, which are
                # stopped in order instead.
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._started.add(spec.name)
        watch = asyncio.create_task(_watch(spec.name, process), name=f"watch {spec.name}")
        self._children[spec.name] = _Child(spec, process, watch)
        return process.pid

    async def ended(self, name: str) -> Exit:
        """Waits until the child of this name has ended."""
        return await asyncio.shield(self._children[name].watch)

    def kill(self, name: str) -> None:
        """Kills a child and its process group with SIGKILL."""
        _kill_group(self._children[name].process.pid)

    async def stop_one(self, name: str) -> None:
        """Stops a child: SIGTERM, the grace period, SIGKILL. Its name may be started again."""
        child = self._children[name]
        await self._stop_children([child])
        if self._children.get(name) is child:
            del self._children[name]

    async def stop(self) -> None:
        """Stops all children, rank by rank: SIGTERM, the grace period, SIGKILL."""
        self._stopping = True
        for rank in sorted({child.spec.stop_rank for child in self._children.values()}):
            await self._stop_rank(rank)

    async def _stop_rank(self, rank: int) -> None:
        ranked = [child for child in self._children.values() if child.spec.stop_rank == rank]
        await self._stop_children(ranked)

    async def _stop_children(self, children: Sequence[_Child]) -> None:
        for child in children:
            ask_to_end(child.process)
            if self._killing:
                _kill(child)
        watches = [child.watch for child in children]
        if not watches:
            return
        _, pending = await asyncio.wait(watches, timeout=self._grace_s)
        for child in children:
            if child.watch in pending:
                _kill(child)
        await asyncio.gather(*watches)

    def hurry(self) -> None:
        """Makes a running or later `stop` use SIGKILL at once."""
        self._killing = True
        if self._stopping:
            for child in self._children.values():
                _kill(child)


async def _watch(name: str, process: asyncio.subprocess.Process) -> Exit:
    code = await process.wait()
    _kill_group(process.pid)  # for example a compiler that a worker had started
    return Exit(name, code)


def _kill(child: _Child) -> None:
    if child.process.returncode is None:
        _kill_group(child.process.pid)


def _kill_group(leader: int) -> None:
    # macOS raises PermissionError if only a zombie is left of the group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def log_tail(path: Path, num_lines: int) -> list[str]:
    """Returns the last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 200 * num_lines))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]
    except OSError:
        return []
