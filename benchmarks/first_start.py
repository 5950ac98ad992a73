"""The first start, as a person lives it: clone, `make up`, first token, Ctrl-C.

    python -m benchmarks.first_start

Every start runs in a clone of this checkout with a home and a temporary folder of its own, so no
cache of this machine helps. One clone starts twice on all cores, another twice on one core that
three busy loops share. Then `make up` is interrupted at random moments, each time in a new clone,
and the processes and unfinished files that are left are counted.
Tests: tests/unit/benchmarks/test_first_start.py, tests/e2e/test_first_start.py.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.result import RESULTS, ROOT, Row, Target, document, markdown, save
from benchmarks.start_sandbox import Leftovers, Sandbox, Start, busy_loops

SECOND_START_GOAL_S = 10.0
NUM_BUSY_LOOPS = 3
START_LIMIT_S = 1800.0
STOP_LIMIT_S = 60.0
INTERRUPTED_AT_ONCE = 2
"""Starts that are interrupted run side by side; none of their times is a target."""

NOTES = """\
install: from `make up` until the stack is being started: packages and native kernels
- ready, first token: seconds after the start of `make up`; the first token is that of a streamed
 chat over HTTP
- crowded: the start and three busy loops share one core, also while it installs and compiles
- interrupted: Ctrl-C (SIGINT to the process group) at a random moment of a first start, in a new
 clone with empty caches; two of them run side by side
- left: processes of the start that still run when `make` has ended, and files of interrupted work
 in its temporary folder, home and clone""".replace("\n ", " ").split("\n- ")


def start_row(name: str, start: Start, sandbox: Sandbox, stop_s: float, left: Leftovers) -> Row:
    """A start that got ready."""
    return {
        "start": name,
        "install s": round(start.install_s, 1),
        "ready s": round(start.ready_s, 1),
        "first token s": round(start.first_token_s, 1),
        "stopped after s": round(stop_s, 1),
        "packages": sandbox.num_packages(),
        ".venv GiB": round(sandbox.venv_bytes() / 1024**3, 2),
        "left": str(left),
    }


@contextmanager
def new_sandbox(source: Path) -> Iterator[Sandbox]:
    """A fresh clone in a temporary folder, which goes with it."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-first-") as folder:
        yield Sandbox.clone(source, Path(folder))


def measured_start(name: str, sandbox: Sandbox, cores: set[int] | None) -> tuple[Row, Start]:
    """Starts, asks for a token, stops by Ctrl-C and counts what is left."""
    say(f"{name}: starting")
    with sandbox.make_up(cores) as running:
        start = running.wait_until_served(START_LIMIT_S)
        stop_s = running.interrupt(STOP_LIMIT_S)
    row = start_row(name, start, sandbox, stop_s, sandbox.leftovers())
    say(f"{name}: ready after {row['ready s']} s, left: {row['left']}")
    return row, start


def interrupted_start(source: Path, after_s: float) -> Row:
    """A first start that is interrupted at a moment."""
    with new_sandbox(source) as sandbox:
        with sandbox.make_up(None) as running:
            stage = running.wait(after_s)
            stop_s = running.interrupt(STOP_LIMIT_S)
        left = sandbox.leftovers()
    row = {
        "interrupted after s": round(after_s, 1),
        "stage": stage,
        "ended within s": round(stop_s, 1),
        "left": str(left),
    }
    say(f"interrupted after {after_s:.1f} s ({stage}): ended within {stop_s:.1f} s, left: {left}")
    return row


def run(source: Path, num_interrupts: int, seed: int) -> tuple[list[Row], list[Target]]:
    """All starts; the first one's time bounds the moments of the interrupts."""
    with new_sandbox(source) as sandbox:
        first_row, first = measured_start("first", sandbox, None)
        second_row, second = measured_start("second", sandbox, None)
    with new_sandbox(source) as sandbox, busy_loops(NUM_BUSY_LOOPS, {0}):
        crowded_row, _ = measured_start("first, crowded core", sandbox, {0})
        crowded_again, _ = measured_start("second, crowded core", sandbox, {0})
    draw = random.Random(seed)
    moments = [draw.uniform(0.0, first.ready_s) for _ in range(num_interrupts)]
    with ThreadPoolExecutor(INTERRUPTED_AT_ONCE) as threads:
        interrupts = list(threads.map(partial(interrupted_start, source), moments))
    rows = [first_row, second_row, crowded_row, crowded_again, *interrupts]
    num_left = sum(row["left"] != str(Leftovers()) for row in rows)
    targets = [
        Target("second start: ready, seconds", second.ready_s, SECOND_START_GOAL_S, at_most=True),
        Target("starts and interrupts that left something", float(num_left), 0.0, at_most=True),
    ]
    return rows, targets


def say(text: str) -> None:
    """Tells how far the benchmark is."""
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes `bench/results/first_start.*`; 1 if something was left behind."""
    parser = argparse.ArgumentParser(description="time first starts and interrupt them")
    parser.add_argument("--interrupts", type=int, default=10, help="starts that are interrupted")
    parser.add_argument("--seed", type=int, default=17, help="of the moments of interrupts")
    parser.add_argument("--source", type=Path, default=ROOT, help="repository to clone")
    parser.add_argument("--out", type=Path, default=RESULTS / "first_start.json")
    arguments = parser.parse_args(argv)
    rows, targets = run(arguments.source, arguments.interrupts, arguments.seed)
    result = document(rows, targets, arguments.seed, NOTES)
    save(result, arguments.out)
    print(markdown(result))
    return 0 if all(target.met for target in targets[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
