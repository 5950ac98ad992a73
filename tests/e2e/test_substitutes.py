"""`kvmesh up` replaces a worker that is killed under load by one other, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.scheduler_access import LiveFleet, SchedulerAccess, live_fleet
from kvmesh.cli.stack_state import read_description
from kvmesh.core.config import child_environment
from kvmesh.core.mesh_secret import load_secret
from kvmesh.core.types import Role
from kvmesh.rpc.channels import MeshAccess
from tests.chaos.load import under_load
from tests.e2e.api_client import ApiClient
from tests.mesh_child import ROOT, scrape
from tests.mesh_processes import MODEL
from tests.waiting import until

LOST = "decode-0"
CALM = {"KVMESH_PLANNING__ROLES": "off"}
"""Else the loop of roles, too, answers the load."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def start(state: Path, log: Path, words: Sequence[str]) -> subprocess.Popen[bytes]:
    paths = {"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}", "KVMESH_ENGINE__FAKE_STEP_S": "0.02"}
    always = ("--port", "0", "--model-name", MODEL, "--state-dir", str(state))
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "kvmesh.cli", "up", *always, *words],
            cwd=ROOT,
            env=child_environment(paths | CALM),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )


@asynccontextmanager
async def running_up(folder: Path, *words: str) -> AsyncIterator[dict[str, Any]]:
    """What `kvmesh up` says of its stack, while it runs."""
    state, log = folder / "state", folder / "up.log"
    process = start(state, log, words)
    try:
        await until(lambda: "stop: Ctrl-C" in log.read_text(), "the stack is ready", 120)
        told = read_description(state)
        assert told is not None
        yield told
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            await asyncio.to_thread(process.wait, 60)
        print(log.read_text(), (state / "logs" / "scheduler.log").read_text())


def member(told: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in told["members"] if each["name"] == name)


def decoders(view: LiveFleet) -> set[tuple[str, int]]:
    """Lives of those that decode."""
    infos = (each.info for each in view.workers)
    return {(info.worker_id, info.incarnation) for info in infos if info.role is Role.DECODE}


def roles(view: LiveFleet) -> Counter[str]:
    return Counter(each.info.role.value for each in view.workers)


@pytest.mark.parametrize(
    ("engine", "num_spare"),
    [
        ("fake", 1),
        pytest.param("fake", 0, marks=pytest.mark.long),
        pytest.param("kvmesh", 1, marks=pytest.mark.long),
    ],
)
async def test_one_kill_under_load_takes_one_substitute(
    tmp_path: Path, engine: str, num_spare: int
) -> None:
    words = ("--engine", engine, "--spare", str(num_spare))
    async with running_up(tmp_path, *words) as told, ApiClient(f"http://{told['http']}") as client:
        secret = load_secret(told["secret_file"])
        scheduler = member(told, "scheduler")
        access = SchedulerAccess((scheduler["address"],), MeshAccess(secret=secret), 60.0)
        async with live_fleet(access, "a test") as view:
            whole, before = roles(view), decoders(view)
            assert whole == Counter(prefill=2, decode=2, spare=num_spare)
            async with under_load(client) as load:
                await load.more(20)
                os.kill(member(told, LOST)["pid"], signal.SIGKILL)
                began = asyncio.get_running_loop().time()
                await until(lambda: len(decoders(view) - before) == 1, "its place is taken")
                full_s = asyncio.get_running_loop().time() - began
                await until(lambda: roles(view) == whole, "it is back")
                await load.more(20)
            print(f"full capacity after {full_s:.2f} s with {num_spare} spares")
            if engine == "fake":
                load.check_all_ok()
            assert all(answer.ok for _, _, answer in load.answers)
            names = {str(each.info.worker_id): each.info.role.value for each in view.workers}
            if num_spare:
                assert (names["spare-0"], names[LOST]) == ("decode", "spare")
                assert full_s < 1.0
            steps = await scrape(f"http://127.0.0.1:{scheduler['metrics_port']}/metrics")
            name = "kvmesh_scheduler_substitutes_total"
            expected = {"spare": num_spare, "return": 1 - num_spare, "flip": 0, "slack": 0}
            assert {step: steps.value(name, step=step) for step in expected} == expected
