"""Tells a process that hangs from one that answers late because it waits for a core.

A parent asks its child a question, such as a gRPC health check, and counts the seconds until the
answer. Not every second counts:

- While a thread of the child waits in the run queue of a core, the child cannot answer. The kernel
  counts that time per thread (`/proc/PID/task/TID/schedstat`); the share of a second that the
  thread that waited longest spent there does not count. A thread that is runnable and has neither
  run nor been counted as waiting has waited all the time: the kernel counts when the wait ends.
- While the main thread waits for a disk (state D), or a debugger holds it (state t), nothing
  counts.
- If the parent itself looks late, at most twice `LOOK_S` count for that look: its own core was
  taken, or the machine slept.

So on a machine with a free core a stopped process (state T), a deadlock and an event loop that
spins or computes all count in full. A healthy process beside busy ones is not charged for the time
in which it could not run. A process hangs when `SILENT_S` have been counted for one question. Where
the kernel has no schedstat, ten times as many seconds must pass.
Tests: tests/unit/core/test_silence.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SILENT_S = 3.0
"""Seconds without an answer, counted as above, after which a process hangs."""

LOOK_S = 0.25
"""Seconds between two looks of a parent at a child that owes an answer."""

PULSE_S = 1.0
"""Seconds between an answer and the next question."""

_UNKNOWN_FACTOR = 10
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """The kernel's accounting of one thread.

    Attributes:
        state: letter of proc(5), such as R, S, D, T, t.
        run_s: seconds on a core.
        wait_s: seconds in a run queue, counted when each wait ends.
    """

    state: str
    run_s: float
    wait_s: float


Threads = Mapping[int, ThreadTimes]


def read_threads(pid: int) -> Threads:
    """Returns the threads of a process by id; empty if it has ended or there is no schedstat."""
    found = {}
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return {}
    for task in tasks:
        try:
            # The name, in brackets, may hold blanks and brackets.
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            run_ns, wait_ns, _ = (task / "schedstat").read_text().split()
        except (OSError, ValueError, IndexError):  # this thread has ended, or there is no schedstat
            continue
        found[int(task.name)] = ThreadTimes(state, int(run_ns) / 1e9, int(wait_ns) / 1e9)
    return found


def counted_share(pid: int, before: Threads, after: Threads, seconds: float) -> float:
    """Returns the fraction of the time between two looks in which the process could answer,
    0..1.
    """
    main = after.get(pid)
    if main is not None and main.state in ("D", "t"):
        return 0.0
    waited = 0.0
    for thread, now in after.items():
        then = before.get(thread)
        if then is None:
            continue
        ran, queued = now.run_s - then.run_s, now.wait_s - then.wait_s
        if now.state == "R" and ran == 0 and queued == 0:
            return 0.0
        waited = max(waited, queued)
    return max(0.0, 1.0 - waited / seconds)


class Silence:
    """Counted seconds for which one process owes an answer.

    Args:
        pid: the process.
        read: returns the kernel's accounting of its threads.
        limit_s: counted seconds after which it hangs.
    """

    def __init__(
        self,
        pid: int,
        read: Callable[[int], Threads] = read_threads,
        limit_s: float = SILENT_S,
    ) -> None:
        self._pid = pid
        self._read = read
        self._limit_s = limit_s
        self._looked_s: float | None = None
        self._threads: Threads = {}
        self.counted_s = 0.0

    def broken(self) -> None:
        """Records an answer: the count restarts with the next question."""
        self._looked_s = None
        self.counted_s = 0.0

    def look(self, now_s: float) -> bool:
        """Counts the time since the last look; returns whether the process hangs.

        The caller calls it every `LOOK_S` while an answer is owed.
        """
        threads = self._read(self._pid)
        if self._looked_s is not None:
            passed_s = now_s - self._looked_s
            counts_s = min(passed_s, 2 * LOOK_S)
            if threads and passed_s > 0:
                counts_s *= counted_share(self._pid, self._threads, threads, passed_s)
            self.counted_s += counts_s if threads else counts_s / _UNKNOWN_FACTOR
        self._looked_s, self._threads = now_s, threads
        return self.counted_s >= self._limit_s


async def until_silent(
    pid: int, ask: Callable[[], Awaitable[bool]], limit_s: float = SILENT_S
) -> None:
    """Asks a process again and again; returns when it hangs.

    Args:
        pid: the process, which already answers questions.
        ask: sends one question and waits, without limit, for any answer; returns False if the port
            is closed, which is no answer.
        limit_s: counted seconds after which it hangs.
    """
    now = asyncio.get_running_loop().time
    silence = Silence(pid, limit_s=limit_s)
    while True:
        asking = asyncio.ensure_future(ask())
        try:
            while not (asking.done() and asking.result()):
                if asking.done():
                    await asyncio.sleep(LOOK_S)
                    asking = asyncio.ensure_future(ask())
                await asyncio.wait((asking,), timeout=LOOK_S)
                answered = asking.done() and asking.result()
                if not answered and silence.look(now()):
                    return
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        silence.broken()
        await asyncio.sleep(PULSE_S)
