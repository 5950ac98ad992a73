"""The load of `benchmarks.transfer` for engines that run under an interpreter of their own.

Imports nothing of this project: those environments do not have it. An engine's script hands what is
its own to `run`, which is both ends.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, Any, Protocol

import numpy as np

MIB, PIECE = 1 << 20, 16 << 10
SHAPES = ("contiguous", "16 KiB pieces")

Range = tuple[int, int]
Row = dict[str, Any]
Send = Callable[[list[Range], list[Range]], Callable[[], None]]
"""(local, remote) ranges as (address, bytes) to a transfer that can be repeated."""


class Engine(Protocol):
    """One end of an engine."""

    def register(self, address: int, num_bytes: int) -> dict[str, Any]:
        """Makes memory known to it; gives what the other end must be told."""
        ...

    def sender(self, told: dict[str, Any]) -> Send:
        """Writes into the other end, of which this was told."""
        ...


def run(engine: str, script: str, make: Callable[[str], Engine]) -> None:
    """Either end, by the arguments of the script: rows are printed as one line of JSON.

    Args:
        engine: its name.
        script: that called this; `SCRIPT KIND '[[sizes], runs, seed]'` sends and starts
            `SCRIPT receive NUM_BYTES` itself.
        make: from `sender` or `receiver` to that end.
    """
    kind, argument = sys.argv[1:]
    out = _quiet_stdout()
    if kind == "receive":
        held, address = _memory(int(argument))
        receiver = make("receiver")
        _say(out, {**receiver.register(address, int(argument)), "address": address})
        sys.stdin.read()
        del held
        return
    sizes, runs, seed = json.loads(argument)
    total = max(sizes) * MIB
    other = _OtherEnd(script, total)
    held, address = _memory(total)
    sender = make("sender")
    sender.register(address, total)
    ends = (address, int(other.told["address"]))
    send = sender.sender(other.told)
    _say(out, {"rows": _rows(f"{engine} {kind}", sizes, runs, seed, ends, other.pid, send)})
    other.close()
    del held


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, all threads, user and system."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives


def _quiet_stdout() -> IO[str]:
    """The real standard output; what the engine prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _say(out: IO[str], message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def _memory(num_bytes: int) -> tuple[Any, int]:
    """Touched memory and its address."""
    array = np.ones(num_bytes, dtype=np.uint8)
    return array, int(array.ctypes.data)


class _OtherEnd:
    """The receiving process: the same script, started with `receive`."""

    def __init__(self, script: str, num_bytes: int) -> None:
        command = [sys.executable, script, "receive", str(num_bytes)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self.told: dict[str, Any] = json.loads(self._process.stdout.readline())
        self.pid = self._process.pid

    def close(self) -> None:
        """Lets it end."""
        self._process.communicate(timeout=30)


def _rows(
    what: str, sizes: list[int], runs: int, seed: int, ends: tuple[int, int], pid: int, send: Send
) -> list[Row]:
    """All sizes and shapes.

    Args:
        ends: addresses here and there.
        pid: of the other end.
    """
    found = []
    for mib in [0.0625, *sizes]:
        for shape in SHAPES:
            count = int(mib * MIB) // PIECE
            local, remote = (_ranges(shape, base, count, seed + i) for i, base in enumerate(ends))
            repeats = runs if mib >= 1 else 500
            measured = _measure(send(local, remote), int(mib * MIB), repeats, (os.getpid(), pid))
            found.append({"what": what, "shape": shape, "mib": mib, "concurrent": 1, **measured})
    return found


def _measure(work: Callable[[], None], num_bytes: int, runs: int, pids: tuple[int, ...]) -> Row:
    work()
    seconds, cpu = [], sum(cpu_seconds(pid) for pid in pids)
    for _ in range(runs):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    cpu = sum(cpu_seconds(pid) for pid in pids) - cpu
    return figures(num_bytes, seconds, cpu)


def figures(num_bytes: int, seconds: list[float], cpu_s: float) -> Row:
    """What a row says of a transfer that was repeated.

    Args:
        seconds: of each time.
        cpu_s: of all processes, for all times together.
    """
    return {
        "gb_s": _spread([num_bytes / second / 1e9 for second in seconds]),
        "ms": _spread([second * 1e3 for second in seconds]),
        "cpu_s_per_gib": round(cpu_s / (len(seconds) * num_bytes / (1 << 30)), 3),
    }


def _ranges(shape: str, base: int, count: int, seed: int) -> list[Range]:
    if shape == "contiguous":
        return [(base, count * PIECE)]
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return [(base + block * PIECE, PIECE) for block in order]


def _spread(values: list[float]) -> Row:
    middle = statistics.median(values)
    return {"min": round(min(values), 3), "median": round(middle, 3), "max": round(max(values), 3)}
