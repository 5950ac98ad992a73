"""The systems of `benchmarks.vllm_serve`: `vllm serve` and `kvmesh up`, on the same cores.

`vllm serve` has its own defaults, with steps compiled and scheduled asynchronously. A system's
engines share the cores: one engine has all of them, each of two has half.
"""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bench_process import HOST, Process, free_port
from kvmesh.core.cores import usable_cores

SERVED = "bench"
CONTEXT = 2048
DTYPE = "bfloat16"
NUM_BLOCKS = 1024
_START_S = 400.0
_STOP_S = 30.0


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh that `kvmesh up` starts.

    Attributes:
        num_prefill: 0: decode workers do both.
    """

    name: str
    engine: str
    num_prefill: int
    num_decode: int


VLLM = "vllm serve"
ONE = Mesh("kvmesh over vllm", "vllm", 0, 1)
TWO = Mesh("kvmesh over vllm x2", "vllm", 0, 2)
APART = Mesh("kvmesh over vllm P/D", "vllm", 1, 1)
OURS = Mesh("kvmesh", "kvmesh", 0, 1)


@dataclass(frozen=True, slots=True)
class Served:
    """A system that answers.

    Attributes:
        engine_words: what the command line or name of a computing process has.
    """

    name: str
    url: str
    process: Process
    engine_words: str

    def kill_engine(self) -> None:
        """Kills one of the processes that compute, as a crash would.

        Raises:
            LookupError: there is none.
        """
        children = psutil.Process(self.process.pid).children(recursive=True)
        engines = [each for each in children if self.engine_words in " ".join(each.cmdline())]
        if not engines:
            raise LookupError(f"{self.name} has no process of {self.engine_words!r}")
        engines[0].kill()


@contextmanager
def vllm_serve(model: Path, folder: Path) -> Iterator[Served]:
    """The server of vLLM itself with one engine on all cores."""
    port = free_port()
    words = ["--model", str(model), "--served-model-name", SERVED, "--host", HOST]
    words += ["--port", str(port), "--dtype", DTYPE, "--max-model-len", str(CONTEXT)]
    words += ["--disable-uvicorn-access-log"]
    environment = {
        "OMP_NUM_THREADS": str(usable_cores()),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with _served(VLLM, command, environment, port, "/health", "EngineCore", folder) as found:
        yield found


@contextmanager
def mesh(of: Mesh, model: Path, folder: Path) -> Iterator[Served]:
    """`kvmesh up`, which divides the cores among engines."""
    port = free_port()
    words = ["--model", str(model), "--model-name", SERVED, "--port", str(port)]
    words += ["--engine", of.engine, "--dtype", DTYPE, "--num-blocks", str(NUM_BLOCKS)]
    words += ["--prefill", str(of.num_prefill), "--decode", str(of.num_decode)]
    words += ["--state-dir", str(folder / "state"), "--start-timeout", f"{_START_S:.0f}"]
    command = [sys.executable, "-m", "kvmesh.cli", "up", *words]
    with _served(of.name, command, {}, port, "/ready", "services.decode", folder) as found:
        yield found


@contextmanager
def _served(
    name: str,
    command: Sequence[str],
    environment: dict[str, str],
    port: int,
    path: str,
    engine_words: str,
    folder: Path,
) -> Iterator[Served]:
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"{key}={value}" for key, value in environment.items()]
    process = Process("system", ["env", *words, *command], folder)
    try:
        url = f"http://{HOST}:{port}"
        _wait(f"{url}{path}", process)
        yield Served(name, url, process, engine_words)
    finally:
        process.stop(_STOP_S)


def _wait(url: str, process: Process) -> None:
    """Waits until the server answers 200."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if not process.running:
            raise RuntimeError(f"it ended:\n{process.log_end}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(f"it is not ready after {_START_S:.0f} s:\n{process.log_end}")
