"""`kvmesh up` as a process, and what it says of its stack."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvmesh.cli.scheduler_access import LiveFleet, SchedulerAccess, live_fleet
from kvmesh.cli.stack_state import read_description
from kvmesh.core.config import child_environment
from kvmesh.core.mesh_secret import load_secret
from kvmesh.rpc.channels import MeshAccess
from tests.mesh_child import ROOT
from tests.mesh_processes import MODEL
from tests.waiting import until

CALM = {"KVMESH_PLANNING__ROLES": "off"}
"""Else the loop of roles, too, answers the load."""


def start(state: Path, log: Path, words: Sequence[str], more_code: Path) -> subprocess.Popen[bytes]:
    code = f"{more_code}:{ROOT / 'libs'}:{ROOT}"
    paths = {"PYTHONPATH": code, "KVMESH_ENGINE__FAKE_STEP_S": "0.02"}
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
    """What `kvmesh up` says of its stack, while it runs. Its processes find code in the folder."""
    state, log = folder / "state", folder / "up.log"
    process = start(state, log, words, folder)
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


@asynccontextmanager
async def watched(told: dict[str, Any]) -> AsyncIterator[LiveFleet]:
    """The fleet of a stack."""
    secret = load_secret(told["secret_file"])
    target = member(told, "scheduler")["address"]
    access = SchedulerAccess((target,), MeshAccess(secret=secret), 60.0)
    async with live_fleet(access, "a test") as view:
        yield view


def member(told: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in told["members"] if each["name"] == name)
