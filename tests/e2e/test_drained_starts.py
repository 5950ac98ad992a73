"""A service that is told to drain while it starts ends with 0 and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from kvmesh.cli.probes import free_ports
from tests.redis_server import redis_process
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
MARKER = "SERVICE_UNDER_TEST"
START_S = 2.0
"""About what a service takes until it serves, on a machine of its own."""

WORKER = ("--worker.id=w", "--engine.kind=fake", "--engine.model-name=m")
SERVICES = {
    "scheduler": ("scheduler", "--redis.url={redis}", "--kvmanager.target={other}"),
    "kvmanager": ("kvmanager", "--redis.url={redis}"),
    "prefill": ("prefill", *WORKER, "--worker.scheduler-targets={other}"),
    "decode": ("decode", *WORKER, "--worker.scheduler-targets={other}"),
    "gateway": ("gateway", "--scheduler.targets={other}", "--redis.url={redis}"),
    "two gateways": ("gateway", "--scheduler.targets={other}", "--http.processes=2"),
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads signals in /proc")


def _handles_sigterm(pid: int) -> bool:
    """Whether a process runs our code: until then the kernel ends it."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def _left(marker: str) -> list[str]:
    """Command lines of the processes that live and have the marker."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))]
)
@pytest.mark.parametrize("name", SERVICES)
async def test_a_drained_start_ends_well(name: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(f"{name} {seed}")
    # As likely before modules are loaded as while it begins to serve.
    later_s = chance.choice((0.3, 1.0, 2.0)) * START_S * chance.random()
    print(f"{name}, seed {seed}: after {later_s:.3f} s")
    temporary, output, marker = tmp_path / "tmp", tmp_path / "output", uuid.uuid4().hex
    temporary.mkdir()
    paths = f"{ROOT / 'libs'}:{ROOT}"
    env = {**os.environ, "TMPDIR": str(temporary), MARKER: marker, "PYTHONPATH": paths}
    with redis_process(tmp_path) as redis, output.open("wb") as file:
        service, *flags = SERVICES[name]
        other = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
        if service == "gateway":
            flags += ["--http.port={http}", "--model.served-name=m"]
        http = free_ports("127.0.0.1", 1)[0]
        words = [flag.format(redis=redis.url, other=other, http=http) for flag in flags]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"services.{service}", *words),
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        try:
            await until(lambda: _handles_sigterm(process.pid), "it runs our code", 60)
            try:
                await asyncio.wait_for(process.wait(), later_s)
            except TimeoutError:
                process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), 60)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        print(output.read_text())
        assert code == 0
        assert "Traceback" not in output.read_text()
        assert _left(marker) == []
        # The user's own folder for sockets stays, empty.
        assert [each for each in temporary.rglob("*") if not each.is_dir()] == []
