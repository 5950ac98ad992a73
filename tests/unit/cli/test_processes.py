from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from kvmesh.cli.processes import Exit, ProcessSpec, Supervisor, log_tail
from tests.waiting import until

# Writes "up", then a word for each signal; `stubborn` survives SIGTERM.
CHILD = """
import signal, sys, time
name, order, stubborn = sys.argv[1:]
def note(number, frame):
    with open(order, "a") as file:
        file.write(name + "\\n")
    if not int(stubborn):
        sys.exit(0)
signal.signal(signal.SIGTERM, note)
print("up", flush=True)
while True:
    signal.pause()
"""


def _spec(tmp_path: Path, name: str, code: str, *argv: str, rank: int = 0) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-c", code, *argv),
        cwd=tmp_path,
        log_path=tmp_path / "logs" / f"{name}.log",
        stop_rank=rank,
        env=dict(os.environ),
    )


def _child(tmp_path: Path, name: str, rank: int = 0, stubborn: bool = False) -> ProcessSpec:
    order = str(tmp_path / "order")
    return _spec(tmp_path, name, CHILD, name, order, str(int(stubborn)), rank=rank)


async def _until_up(spec: ProcessSpec) -> None:
    await until(lambda: log_tail(spec.log_path, 1) == ["up"], f"{spec.name} is up")


def _is_alive(pid: int) -> bool:
    # A zombie still has its id; it is dead all the same.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
async def supervisor() -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(grace_s=30)
    yield supervisor
    supervisor.hurry()
    await supervisor.stop()


async def test_children_stop_in_the_order_of_their_ranks(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    specs = [_child(tmp_path, name, rank) for name, rank in (("c", 2), ("a", 0), ("b", 1))]
    for spec in specs:
        await supervisor.start(spec)
    for spec in specs:
        await _until_up(spec)
    pids = supervisor.pids
    assert sorted(pids) == ["a", "b", "c"]
    await supervisor.stop()
    assert (tmp_path / "order").read_text().split() == ["a", "b", "c"]
    assert supervisor.pids == {}
    assert not any(_is_alive(pid) for pid in pids.values())


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    supervisor = Supervisor(grace_s=0.05)
    spec = _child(tmp_path, "a", stubborn=True)
    await supervisor.start(spec)
    await _until_up(spec)
    await supervisor.stop()
    assert supervisor.pids == {}
    assert (tmp_path / "order").read_text() == "a\n"


async def test_hurry_cuts_the_grace_short(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = _child(tmp_path, "a", stubborn=True)
    await supervisor.start(spec)
    await _until_up(spec)
    stopping = asyncio.create_task(supervisor.stop())
    async with asyncio.timeout(20):  # less than the grace
        await until((tmp_path / "order").exists)
        supervisor.hurry()
        await stopping


async def test_an_exit_is_reported(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = _spec(tmp_path, "a", "import sys; print('oh no'); sys.exit(3)")
    await supervisor.start(spec)
    async with asyncio.timeout(30):
        assert await supervisor.ended("a") == Exit("a", 3)
    assert log_tail(spec.log_path, 5) == ["oh no"]
    assert supervisor.pids == {}


async def test_a_signal_is_reported_by_its_name(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = _child(tmp_path, "a")
    await supervisor.start(spec)
    os.kill(supervisor.pids["a"], signal.SIGKILL)
    async with asyncio.timeout(30):
        assert str(await supervisor.ended("a")) == "a was killed by SIGKILL"


async def test_hurry_before_a_stop_waits_for_it(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = _child(tmp_path, "a", stubborn=True)
    await supervisor.start(spec)
    await _until_up(spec)
    supervisor.hurry()
    assert supervisor.pids, "only a stop ends children"
    async with asyncio.timeout(20):  # less than the grace
        await supervisor.stop()


async def test_a_child_that_is_stopped_by_a_signal_can_end(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    spec = _child(tmp_path, "a")
    await supervisor.start(spec)
    await _until_up(spec)
    os.kill(supervisor.pids["a"], signal.SIGSTOP)
    async with asyncio.timeout(20):  # less than the grace
        await supervisor.stop()
    assert (tmp_path / "order").read_text() == "a\n"


@pytest.mark.parametrize("how", ["ends", "is killed"])
async def test_what_a_child_started_ends_with_it(
    supervisor: Supervisor, tmp_path: Path, how: str
) -> None:
    started = tmp_path / "started"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n"
        "time.sleep(600 if sys.argv[2] == 'is killed' else 0)\n"
    )
    await supervisor.start(_spec(tmp_path, "a", code, str(started), how))
    await until(lambda: started.exists() and started.read_text())
    if how == "is killed":
        supervisor.kill("a")
    async with asyncio.timeout(30):
        await supervisor.ended("a")
    await until(lambda: not _is_alive(int(started.read_text())), "nothing is left of its group")


async def test_a_restarted_child_goes_on_with_its_log(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    spec = _spec(tmp_path, "a", "print('life')")
    spec.log_path.parent.mkdir()
    spec.log_path.write_text("of a stack before\n")
    for _ in range(2):
        await supervisor.start(spec)
        async with asyncio.timeout(30):
            await supervisor.ended("a")
    assert log_tail(spec.log_path, 9) == ["life", "life"]


async def test_children_have_a_session_of_their_own(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.start(_child(tmp_path, "a"))
    pid = supervisor.pids["a"]
    assert os.getsid(pid) == pid != os.getsid(0)


async def test_a_missing_program(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = ProcessSpec("a", (str(tmp_path / "nothing"),), tmp_path, tmp_path / "a.log")
    with pytest.raises(FileNotFoundError):
        await supervisor.start(spec)
    await supervisor.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of the death")
def test_children_do_not_outlive_their_parent(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, sys
from pathlib import Path
from kvmesh.cli.processes import ProcessSpec, Supervisor
from tests.waiting import until
async def main():
    supervisor = Supervisor(1.0)
    folder = Path({str(tmp_path)!r})
    sleep = (sys.executable, "-c", "import signal; signal.pause()")
    await supervisor.start(ProcessSpec("a", sleep, folder, folder / "a.log", 0, dict(os.environ)))
    print(supervisor.pids["a"], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        # Opened while it lives, so that its end can be waited for whoever reaps it.
        watch = os.pidfd_open(child)
        parent.kill()
    try:
        assert select.select([watch], [], [], 30)[0], "the child lives on"
    finally:
        os.close(watch)


def test_log_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_tail(path, 3) == []
    path.write_text("".join(f"{number}\n" for number in range(1000)))
    assert log_tail(path, 3) == ["997", "998", "999"]
