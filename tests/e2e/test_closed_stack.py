"""`kvmesh up`, twice on one host: nobody else gets in, and the secrets are nowhere to be read."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis.asyncio
from redis.exceptions import AuthenticationError

from kvmesh.cli.__main__ import main
from kvmesh.cli.stack_state import read_description
from kvmesh.core.config import child_environment
from tests.mesh_child import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@dataclass
class Stack:
    state: Path
    process: subprocess.Popen[bytes]

    @property
    def told(self) -> dict[str, Any]:
        return read_description(self.state) or {}

    def address(self, name: str) -> str:
        return str(next(each["address"] for each in self.told["members"] if each["name"] == name))

    @property
    def secrets(self) -> list[str]:
        password = (self.state / "redis-password.conf").read_text().split()[1]
        return [(self.state / "mesh.secret").read_text(), password]


def start(state: Path, log: Path) -> subprocess.Popen[bytes]:
    flags = ("--engine", "fake", "--port", "0", "--prefill", "1", "--decode", "1")
    log.parent.mkdir()
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "kvmesh.cli", "up", *flags, "--state-dir", str(state)],
            cwd=ROOT,
            env=child_environment({"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            umask=0o022,
        )


@asynccontextmanager
async def stack(folder: Path) -> AsyncIterator[Stack]:
    state, log = folder / "state", folder / "up.log"
    process = start(state, log)
    try:
        await until(lambda: "stop: Ctrl-C" in log.read_text(), "the stack is ready", 120)
        yield Stack(state, process)
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        if process.poll() is None:
            process.terminate()
            await asyncio.to_thread(process.wait, 60)
        print(log.read_text())


async def listed(of: Stack, told_by: Stack, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """`kvmesh fleet list` of a stack, as somebody who has the state of a stack."""
    capsys.readouterr()
    where = ("--scheduler", of.address("scheduler"), "--state-dir", str(told_by.state))
    code = await asyncio.to_thread(main, ["fleet", "list", *where])
    said = capsys.readouterr()
    return code, said.out + said.err


def check_nothing_is_told(of: Stack) -> None:
    secrets = of.secrets
    processes = [psutil.Process(of.process.pid)]
    processes += processes[0].children(recursive=True)
    assert len(processes) >= 7
    for process in processes:
        words = " ".join(process.cmdline())
        assert not any(secret in words for secret in secrets), words
    files = [path for path in of.state.rglob("*") if path.is_file()]
    assert {"redis.log", "gateway.log", "stack.json"} <= {path.name for path in files}
    telling = {
        path.name
        for path in files
        if any(secret in path.read_text(errors="replace") for secret in secrets)
    }
    assert telling == {"mesh.secret", "redis-password.conf"}
    assert stat.S_IMODE(of.state.stat().st_mode) == 0o700
    for name in telling:
        assert stat.S_IMODE((of.state / name).stat().st_mode) == 0o600


async def check_redis(of: Stack) -> None:
    host, _, port = of.address("redis").rpartition(":")
    async with redis.asyncio.Redis(host=host, port=int(port)) as client:
        with pytest.raises(AuthenticationError):
            await client.ping()
    async with redis.asyncio.Redis(host=host, port=int(port), password=of.secrets[1]) as client:
        assert await client.keys("{kvmesh:}*")  # the services are in


async def test_stacks_are_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack(tmp_path / "one") as one, stack(tmp_path / "two") as two:
        for own, other in ((one, two), (two, one)):
            check_nothing_is_told(own)
            await check_redis(own)
            assert (await listed(own, own, capsys))[0] == 0
            code, text = await listed(own, other, capsys)
            assert code == 1
            assert "another secret than this mesh" in text
        assert len({*one.secrets, *two.secrets}) == 4
        assert json.loads((one.state / "stack.json").read_text())["secret_file"]
    for state in (one.state, two.state):
        assert {path.name for path in state.iterdir()} == {"lock", "logs", "traces"}
