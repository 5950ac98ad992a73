"""Child processes of benchmarks, on free ports of this machine."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.result import ROOT
from kvmesh.core.config import child_environment

HOST = "127.0.0.1"
_STOP_S = 5.0


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A child process; what it logs goes to a file, its standard streams are for orders.

    Args:
        cwd: its working directory; if that is a checkout, its modules are from there.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, cwd: Path = ROOT) -> None:
        self.name = name
        self._log_path = folder / f"{name}.log"
        tree = cwd if (cwd / "services").is_dir() else ROOT
        environment = child_environment({"PYTHONPATH": f"{tree / 'libs'}:{tree}"})
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    @property
    def running(self) -> bool:
        """Whether it lives."""
        return self._process.poll() is None

    @property
    def cpu_s(self) -> float:
        """Processor time of it and its children, in seconds."""
        root = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    @property
    def exact_cpu_s(self) -> float:
        """As `cpu_s`, of its own threads alone, to a microsecond instead of ten milliseconds."""
        total_ns = 0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            with suppress(FileNotFoundError):  # a thread that has just ended
                total_ns += int((task / "schedstat").read_text().split()[0])
        return total_ns / 1e9

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def log_end(self) -> str:
        """What it logged last."""
        return self._log_path.read_text(errors="replace")[-2000:]

    async def line(self) -> str:
        """As `next_line`, while the event loop goes on."""
        return await asyncio.to_thread(self.next_line)

    def next_line(self) -> str:
        """Its next line of output.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended:\n{self.log_end}")
        return line.decode().strip()

    def tell(self, order: Mapping[str, object]) -> None:
        """Sends it a line of JSON."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kills it as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self, patience_s: float = _STOP_S) -> None:
        """Ends it, as a crash would if it does not listen for so long."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
