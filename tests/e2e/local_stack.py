"""`kvmesh up` as a process, and what it says of its stack."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvmesh.cli.scheduler_access import LiveFleet, SchedulerAccess, live_fleet
from kvmesh.cli.stack_state import read_description
from kvmesh.core.config import child_environment
from kvmesh.core.mesh_secret import load_secret
from kvmesh.rpc.channels import MeshAccess
from tests.mesh_child import ROOT
from tests.mesh_processes import MODEL, MODEL_FOLDER, VOCAB_SIZE
from tests.waiting import until

FEWER_TOKENS = VOCAB_SIZE - 64
"""Of another checkpoint."""

CALM = {"KVMESH_PLANNING__ROLES": "off"}
"""Else the loop of roles, too, answers the load."""

WORKERS = frozenset({"services.prefill", "services.decode"})
"""Modules of their processes."""

NOTHING_MORE: Mapping[str, str] = MappingProxyType({})


def faulty(folder: Path, *names: str, kind: str = "fake", step_s: float = 0.0) -> None:
    """Lets the engines of workers of a stack that is started with this folder be made ill.

    Args:
        names: of these workers.
        kind: of their engine, as in `engine.kind`.
        step_s: least time of a step of every worker.
    """
    (folder / "sitecustomize.py").write_text(
        "import pathlib, sys\n"
        f"names, step_s = {names!r}, {step_s!r}\n"
        "name = next((each for each in names if each in sys.orig_argv), 'nobody')\n"
        f"is_paced = step_s and not {WORKERS!r}.isdisjoint(sys.orig_argv)\n"
        "if is_paced or name in names:\n"
        "    from tests.faulty_worker import fall_ill\n"
        f"    file = pathlib.Path({str(folder)!r}, name + '.fault')\n"
        f"    fall_ill(file, kind={kind!r}, step_s=step_s)\n"
    )


def fault_of(folder: Path, name: str) -> Path:
    """The file that says what is wrong with an engine; see `tests/faulty_worker.py`."""
    return folder / f"{name}.fault"


def start(
    state: Path, log: Path, words: Sequence[str], more_code: Path, more: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    code = f"{more_code}:{ROOT / 'libs'}:{ROOT}"
    paths = {"PYTHONPATH": code, "KVMESH_ENGINE__FAKE_STEP_S": "0.02"}
    always = ("--port", "0", "--model-name", MODEL, "--state-dir", str(state))
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "kvmesh.cli", "up", *always, *words],
            cwd=ROOT,
            env=child_environment(paths | CALM | dict(more)),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )


async def group(state: Path, *words: str) -> str:
    """Runs `kvmesh group`, and expects that it succeeds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvmesh.cli", "group", *words),
        *("--state-dir", str(state), "--timeout", "200"),
        cwd=ROOT,
        env=child_environment({"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def another_checkpoint(folder: Path) -> Path:
    """The same with fewer tokens: the fake engine takes it for another model."""
    shutil.copytree(MODEL_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = FEWER_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@asynccontextmanager
async def running_up(
    folder: Path, *words: str, more: Mapping[str, str] = NOTHING_MORE
) -> AsyncIterator[dict[str, Any]]:
    """What `kvmesh up` says of its stack, while it runs. Its processes find code in the folder.

    Args:
        more: of their environment.
    """
    state, log = folder / "state", folder / "up.log"
    process = start(state, log, words, folder, more)
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


@asynccontextmanager
async def a_taken_port(port: int) -> AsyncIterator[None]:
    """Somebody else listens there, as soon as it is free."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def is_bound() -> bool:
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:  # whoever was killed still has it
                return False
            return True

        await until(is_bound, "the port is free")
        taken.listen()
        yield
