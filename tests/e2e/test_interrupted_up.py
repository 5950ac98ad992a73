"""`kvmesh up` that is interrupted or killed at a random moment leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvmesh.cli.launcher import INTERRUPTED
from kvmesh.cli.stack_state import hold_state
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
MARKER = "STACK_UNDER_TEST"
STARTS = 20
"""Lines that a stack prints until it is ready, about."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads environments in /proc"),
]


@dataclass
class Up:
    """A `kvmesh up` in a session of its own, and all processes that carry its marker."""

    process: asyncio.subprocess.Process
    marker: str
    state: Path
    output: Path

    @classmethod
    async def start(cls, folder: Path, home: Path | None, **extra: str) -> Up:
        marker = uuid.uuid4().hex
        env = {**os.environ, **extra, MARKER: marker, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
        if home is not None:
            env["HOME"] = str(home)
        state, output = folder / "state", folder / "output"
        words = ("up", "--engine", "fake", "--prefill", "1", "--decode", "1", "--port", "0")
        with output.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvmesh.cli", *words, "--state-dir", str(state)),
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return cls(process, marker, state, output)

    @property
    def said(self) -> str:
        return self.output.read_text()

    def left(self) -> list[str]:
        """Command lines of the processes that live."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == self.marker:
                    found.append(" ".join(process.cmdline()))
            except (psutil.Error, OSError):
                continue
        return found

    async def until_said(self, num_lines: int) -> None:
        """Waits for so many lines of output, or for all of a ready stack."""

        def enough() -> bool:
            ended = self.process.returncode is not None
            return ended or "stop: Ctrl-C" in self.said or len(self.said.splitlines()) >= num_lines

        await until(enough, f"{num_lines} lines", 150)

    async def ends_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self.process.wait(), seconds)
        except TimeoutError:
            return False
        return True


@pytest.fixture
async def stacks(tmp_path: Path) -> AsyncIterator[list[Up]]:
    made: list[Up] = []
    yield made
    for up in made:
        if up.process.returncode is None:
            up.process.kill()
            await up.process.wait()


# Six have each way to stop with and without a cache once.
@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 10))]
)
async def test_nothing_is_left(seed: int, tmp_path: Path, stacks: list[Up]) -> None:
    chance = random.Random(seed)
    num_lines = chance.randrange(STARTS)
    later_s = chance.choice((0.0, chance.random()))
    number = chance.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    # Twice, for the stop itself; or not at all, for a launcher that cannot stop anything.
    how = ("once", "twice", "killed")[seed % 3]
    # Without a cache the workers are at work on native code when they are interrupted.
    home = tmp_path / "home" if seed % 2 else None
    print(f"seed {seed}: {num_lines} lines, {later_s:.3f} s, {number.name}, {how}, home {home}")

    up = await Up.start(tmp_path, home)
    stacks.append(up)
    await up.until_said(num_lines)
    if not await up.ends_within(later_s):
        up.process.send_signal(signal.SIGKILL if how == "killed" else number)
        if how == "twice" and not await up.ends_within(chance.random() * 2):
            up.process.send_signal(number)
    async with asyncio.timeout(60):
        code = await up.process.wait()

    print(up.said)
    # Negative: before there was a handler, or killed.
    allowed = {0, INTERRUPTED, -signal.SIGKILL} if how == "killed" else {0, INTERRUPTED, -number}
    assert code in allowed
    assert "Traceback" not in up.said
    if how == "killed":
        await until(lambda: not up.left(), "nobody outlives the launcher", 20)
    else:
        assert up.left() == []
        assert not (up.state / "stack.json").exists()
    with hold_state(up.state):
        pass
    assert home is None or not list(home.rglob("*.part"))


async def test_a_stop_while_a_worker_is_restarted(tmp_path: Path, stacks: list[Up]) -> None:
    up = await Up.start(tmp_path, None)
    stacks.append(up)
    await up.until_said(1000)
    members = json.loads((up.state / "stack.json").read_text())["members"]
    pids = {member["name"]: member["pid"] for member in members}
    for name in ("decode-0", "gateway", "redis"):
        os.kill(pids[name], signal.SIGKILL)
    await until(lambda: up.said.count("was killed by SIGKILL; restarting it") == 3)
    up.process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        assert await up.process.wait() == 0
    assert up.left() == []


@pytest.mark.long
async def test_a_hung_service_is_replaced_and_the_stack_is_ready_again(
    tmp_path: Path, stacks: list[Up]
) -> None:
    up = await Up.start(tmp_path, None)
    stacks.append(up)
    await up.until_said(1000)
    members = json.loads((up.state / "stack.json").read_text())["members"]
    hung = ("redis", "kvmanager", "scheduler", "decode-0", "gateway")
    for member in members:
        if member["name"] in hung:
            os.kill(member["pid"], signal.SIGSTOP)
    for name in hung:
        await until(
            lambda name=name: f"{name} gave no answer" in up.said,  # type: ignore[misc]
            f"{name} is found",
        )
        await until(
            lambda name=name: f"{name:12} ready again" in up.said,  # type: ignore[misc]
            f"{name} is ready again",
        )
    assert "prefill-0 gave" not in up.said
    up.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await up.process.wait() == 0
    assert up.left() == []


@pytest.mark.long
async def test_a_hung_process_of_several_is_replaced_by_its_parent(
    tmp_path: Path, stacks: list[Up]
) -> None:
    up = await Up.start(tmp_path, None, KVMESH_HTTP__PROCESSES="2")
    stacks.append(up)
    await up.until_said(1000)
    log = up.state / "logs" / "gateway.log"
    # Before a parent has an answer of a process, it waits as long as a start may take.
    await until(lambda: log.read_text().count(" gateway_process_ready ") == 2, "both answer")
    members = json.loads((up.state / "stack.json").read_text())["members"]
    gateway = psutil.Process(next(each["pid"] for each in members if each["name"] == "gateway"))
    for number, child in enumerate(gateway.children(), 1):  # one of them answers the launcher
        child.suspend()
        await until(lambda n=number: log.read_text().count(" serving ") == 2 + n)  # type: ignore[misc]
    assert log.read_text().count("gateway_process_hung") == 2
    assert gateway.is_running()
    assert "gave no answer" not in up.said
    up.process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        assert await up.process.wait() == 0
    assert up.left() == []
