"""One service process of a mesh: started on free ports, killed at will, always reaped.

It says in its log where it listens, so nobody has to guess a free port.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.core.config import child_environment
from tests.fork_server import ForkedProcess, fork_server
from tests.waiting import until

ROOT = Path(__file__).parents[1]

STOP_S = 30.0

# Dies with its parent, so that a test run that is killed leaves nobody behind.
_BOOT = """
import ctypes, os, runpy, signal, sys
from tests.waiting import until
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
parent, module, *arguments = sys.argv[1:]
if os.getppid() != int(parent):
    os._exit(113)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass
class Child:
    """One service process; `start` it again after it ended.

    Attributes:
        sticky: its peers know its ports, so it keeps them when it is started again.
        prefix: what its command begins with; it must not fork.
        is_forked: whether it begins with its modules loaded, instead of loading them.
        fault: a worker's engine is as ill as this file says; see `tests/faulty_worker.py`.
    """

    name: str
    service: str
    flags: dict[str, object]
    folder: Path
    sticky: bool = False
    prefix: tuple[str, ...] = ()
    is_forked: bool = False
    fault: Path | None = None
    lives: int = 0
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    _seen: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def log_path(self) -> Path:
        """The log of the current life."""
        return self.folder / f"{self.name}.{self.lives}.log"

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Starts the process; `ready` waits for it."""
        assert not self.running, f"{self.name} runs"
        self.lives += 1
        self._seen, self._events = 0, []
        arguments = [f"--{flag}={value}" for flag, value in self.flags.items()]
        module = f"services.{self.service}"
        if self.fault is not None:
            module = "tests.faulty_worker"
            arguments = [str(self.fault), self.service, *arguments]
        with self.log_path.open("wb") as log:
            if self.is_forked and not self.prefix:
                self.process = fork_server().start(module, arguments, log.fileno())
                return
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-c", _BOOT, str(os.getpid()), module, *arguments],
                cwd=ROOT,
                env=child_environment({"OMP_NUM_THREADS": "1"}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def ready(self) -> None:
        """Waits until the service serves."""
        await until(lambda: self.event("serving") or not self.running, f"{self.name} serves", 120)
        assert self.running, f"{self.name} ended:\n{self.log_path.read_text()}"
        if self.sticky:
            self.flags["server.port"] = self.address.rpartition(":")[2]
            if self.service == "gateway":
                self.flags["http.port"] = self.address_of("http_serving").rpartition(":")[2]

    def events(self) -> list[dict[str, Any]]:
        """All log lines of this life so far."""
        with self.log_path.open("rb") as log:
            log.seek(self._seen)
            for line in log:
                if not line.endswith(b"\n"):
                    break  # half written
                self._seen += len(line)
                if line.startswith(b"{"):
                    self._events.append(json.loads(line))
        return self._events

    def event(self, name: str) -> dict[str, Any] | None:
        """The first log line of that name in this life."""
        return next((line for line in self.events() if line["event"] == name), None)

    def address_of(self, event: str) -> str:
        """The address in a log line."""
        found = self.event(event)
        assert found is not None, f"{self.name} has not logged {event}"
        return str(found["address"])

    @property
    def address(self) -> str:
        """Where its gRPC services are."""
        return self.address_of("serving")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the process at once and reaps it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def exit_code(self, timeout_s: float = STOP_S) -> int:
        """Waits for the end of the process."""
        await until(lambda: not self.running, f"{self.name} ends", timeout_s)
        assert self.process is not None
        return self.process.wait()

    async def metrics(self) -> Metrics:
        """What its metrics are now."""
        url = f"http://{self.address_of('metrics_serving')}/metrics"
        return await scrape(url)


@dataclass(frozen=True)
class Metrics:
    """One scrape; samples are read when they are asked for, as most never are."""

    text: str

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and these labels among theirs."""
        lines = [line for line in self.text.splitlines() if line.startswith(name)]
        return sum(
            sample.value
            for family in text_string_to_metric_families("\n".join(lines))
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


async def scrape(url: str) -> Metrics:
    """Reads an exposition."""
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return Metrics(await response.text())
