from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvmesh.core.silence import (
    LOOK_S,
    SILENT_S,
    Silence,
    Threads,
    ThreadTimes,
    counted_share,
    read_threads,
    until_silent,
)
from tests.waiting import until

PID = 7


def _main(state: str, run_s: float = 0.0, wait_s: float = 0.0) -> Threads:
    return {PID: ThreadTimes(state, run_s, wait_s)}


@pytest.mark.parametrize(
    ("what", "before", "after", "share"),
    [
        ("stopped", _main("T"), _main("T"), 1.0),
        ("a dead lock", _main("S"), _main("S"), 1.0),
        ("spins on a free core", _main("R"), _main("R", run_s=0.5), 1.0),
        ("beside three others", _main("R"), _main("R", run_s=0.125, wait_s=0.375), 0.25),
        ("has waited all the time", _main("R"), _main("R"), 0.0),
        ("waits for a disk", _main("D"), _main("D"), 0.0),
        ("held by a debugger", _main("t"), _main("t"), 0.0),
        ("a long wait was counted late", _main("R"), _main("R", wait_s=3.0), 0.0),
        ("a thread that began now", {}, {8: ThreadTimes("S", 9.0, 9.0)}, 1.0),
    ],
)
def test_what_counts(what: str, before: Threads, after: Threads, share: float) -> None:
    assert counted_share(PID, before, after, 0.5) == share, what


def test_another_thread_that_waits_for_a_core_may_hold_what_the_main_one_needs() -> None:
    before = {**_main("S"), 8: ThreadTimes("R", 0.0, 0.0)}
    after = {**_main("S"), 8: ThreadTimes("R", 0.25, 0.25)}
    assert counted_share(PID, before, after, 0.5) == 0.5


def _looks(silence: Silence, seconds: float, start_s: float = 0.0, step_s: float = LOOK_S) -> bool:
    hangs = False
    for number in range(int(seconds / step_s) + 1):
        hangs = silence.look(start_s + number * step_s)
    return hangs


def test_a_silent_process_hangs_after_a_while() -> None:
    silence = Silence(PID, lambda _: _main("S"))
    assert not _looks(silence, SILENT_S - LOOK_S)
    assert silence.look(SILENT_S)


def test_an_answer_begins_a_new_count() -> None:
    silence = Silence(PID, lambda _: _main("S"))
    assert not _looks(silence, SILENT_S - LOOK_S)
    silence.broken()
    assert not _looks(silence, SILENT_S - LOOK_S, start_s=SILENT_S)


def test_a_parent_that_looked_late_counts_little() -> None:
    silence = Silence(PID, lambda _: _main("S"))
    silence.look(0.0)
    assert not silence.look(1000.0)
    assert silence.counted_s == 2 * LOOK_S


def test_where_the_kernel_tells_nothing_it_takes_longer() -> None:
    silence = Silence(PID, lambda _: {})
    assert not _looks(silence, 9 * SILENT_S)
    assert _looks(silence, SILENT_S + LOOK_S, start_s=9 * SILENT_S + LOOK_S)


def test_threads_of_this_process() -> None:
    threads = read_threads(os.getpid())
    if sys.platform == "linux":
        assert threads[os.getpid()].state == "R"
        assert threads[os.getpid()].run_s > 0
    assert read_threads(2**22 + 1) == {}


SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
# Answers a byte with a byte, until it is told to spin or to wait for a lock that nobody gives.
CHILD = """
import os, sys, threading
os.sched_setaffinity(0, {int(sys.argv[1])})
lock = threading.Lock(); lock.acquire()
while True:
    word = sys.stdin.buffer.read(1)
    if word == b"s":
        while True: pass
    if word == b"l":
        lock.acquire()
    sys.stdout.buffer.write(word); sys.stdout.flush()
"""


class Answering:
    """A process that answers; `ask` is for `until_silent`."""

    def __init__(self, core: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(core)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.num_answers = 0

    def say(self, word: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word)

    async def ask(self) -> bool:
        assert self.process.stdout is not None
        self.say(b"?")
        answered = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.process.stdout, answered.set)
        try:
            await answered.wait()
            self.process.stdout.read(1)
        finally:
            loop.remove_reader(self.process.stdout)
        self.num_answers += 1
        return True


@pytest.fixture
def child() -> Iterator[Answering]:
    child = Answering(min(os.sched_getaffinity(0)))
    yield child
    child.process.kill()
    with child.process:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(lambda child: child.process.send_signal(signal.SIGSTOP), id="stopped"),
        pytest.param(lambda child: child.say(b"s"), id="spins"),
        pytest.param(lambda child: child.say(b"l"), id="waits for a lock"),
    ],
)
async def test_a_process_that_hangs_is_found(
    child: Answering, hang: Callable[[Answering], None]
) -> None:
    watching = asyncio.create_task(until_silent(child.process.pid, child.ask))
    await until(lambda: child.num_answers)
    hang(child)
    async with asyncio.timeout(50):
        await watching


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_healthy_process_beside_busy_ones_on_its_core_is_left_alone(
    child: Answering,
) -> None:
    core = str(min(os.sched_getaffinity(0)))
    busy = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", SPIN, core) for _ in range(9)
    ]
    watching = asyncio.create_task(until_silent(child.process.pid, child.ask))
    try:
        await until(lambda: child.num_answers >= 4 or watching.done())
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for process in busy:
            process.kill()
            await process.wait()
