"""The systems of `benchmarks.vllm_serve`, on the same cores: `vllm serve`, `kvmesh up`, Dynamo.

`vllm serve` has its own defaults, with steps compiled and scheduled asynchronously. A system's
engines share the cores: one engine has all of them, each of two has half.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bench_process import HOST, Process, free_port
from kvmesh.core.cores import usable_cores

SERVED = "bench"
CONTEXT = 2048
NUM_BLOCKS = 1024
_START_S = 400.0
_STOP_S = 30.0
_VLLM = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": HOST,
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_DYNAMO = {
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_LOG": "error",
}
_STUB = Path(__file__).with_name("torchvision_stub")
_MIGRATIONS = "3"
_MOVES = "kvmesh_gateway_moves_total"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh that `kvmesh up` starts.

    Attributes:
        num_prefill: 0: decode workers do both.
        num_ranks: processes of a worker, which share each layer.
    """

    name: str
    engine: str
    num_prefill: int
    num_decode: int
    num_ranks: int = 1

    @property
    def killed_words(self) -> str:
        """Words of a process to kill: it computes, and does not lead where ranks are several."""
        return "services.decode" if self.num_ranks == 1 else "vllm_follower"


VLLM = "vllm serve"
DYNAMO = "dynamo over vllm"
DYNAMO_TWO = "dynamo over vllm x2"
ONE = Mesh("kvmesh over vllm", "vllm", 0, 1)
TWO = Mesh("kvmesh over vllm x2", "vllm", 0, 2)
APART = Mesh("kvmesh over vllm P/D", "vllm", 1, 1)
RANKS = Mesh("kvmesh over vllm TP2 x2", "vllm", 0, 2, num_ranks=2)
OURS = Mesh("kvmesh", "kvmesh", 0, 1)


@dataclass(frozen=True, slots=True)
class Served:
    """A system that answers.

    Attributes:
        engine_words: what the command line or name of a computing process has.
    """

    name: str
    url: str
    processes: Sequence[Process]
    engine_words: str

    def kill_engine(self) -> None:
        """Kills one of the processes that compute, as a crash would.

        Raises:
            LookupError: there is none.
        """
        trees = [psutil.Process(each.pid).children(recursive=True) for each in self.processes]
        children = itertools.chain.from_iterable(trees)
        running = [each for each in children if each.status() != psutil.STATUS_ZOMBIE]
        engines = [each for each in running if self.engine_words in " ".join(each.cmdline())]
        if not engines:
            raise LookupError(f"{self.name} has no process of {self.engine_words!r}")
        engines[0].kill()

    def moved_after_s(self, timeout_s: float = 30.0) -> float | None:
        """Kills an engine, and returns the seconds until its streams are offered to others.

        None if the system counts no moved streams, or moves none in time.
        """
        before = moves(self.url)
        self.kill_engine()
        began = time.monotonic()
        while before is not None and time.monotonic() < began + timeout_s:
            if (moves(self.url) or 0.0) > before:
                return time.monotonic() - began
            time.sleep(0.02)
        return None


def moves(url: str) -> float | None:
    """Streams that a gateway has moved away from lost workers; None if a server does not count."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10.0) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    if not any("kvmesh_gateway_moves" in line for line in lines):
        return None
    return sum(float(line.split()[-1]) for line in lines if line.startswith(_MOVES))


@contextmanager
def vllm_serve(model: Path, dtype: str, folder: Path) -> Iterator[Served]:
    """The server of vLLM itself with one engine on all cores."""
    port = free_port()
    words = [*_engine_words(model, dtype), "--host", HOST, "--port", str(port)]
    words += ["--disable-uvicorn-access-log"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    environment = {**_VLLM, "OMP_NUM_THREADS": str(usable_cores())}
    with _process("system", command, environment, folder) as process:
        _wait(f"http://{HOST}:{port}/health", [process])
        yield Served(VLLM, f"http://{HOST}:{port}", [process], "EngineCore")


@contextmanager
def dynamo(
    name: str, num_workers: int, packages: Path, model: Path, dtype: str, folder: Path
) -> Iterator[Served]:
    """Dynamo's frontend, which moves streams of lost workers, before workers of `dynamo.vllm`.

    Args:
        packages: a folder with ai-dynamo, ai-dynamo-runtime and torchvision.
    """
    port, store = free_port(), folder / "store"
    environment = {
        **_VLLM,
        **_DYNAMO,
        "DYN_FILE_KV": str(store),
        "OMP_NUM_THREADS": str(max(1, usable_cores() // num_workers)),
        "PYTHONPATH": os.pathsep.join([str(_STUB), str(packages)]),
    }
    worker = [sys.executable, "-m", "dynamo.vllm", *_engine_words(model, dtype)]
    front = [sys.executable, "-m", "dynamo.frontend", "--http-host", HOST]
    front += ["--http-port", str(port), "--migration-limit", _MIGRATIONS]
    with ExitStack() as stack:
        commands = {f"worker-{number}": worker for number in range(num_workers)}
        processes = [
            stack.enter_context(_process(each, command, environment, folder))
            for each, command in {**commands, "front": front}.items()
        ]

        def is_ready(listed: bytes) -> bool:
            # A worker writes a card of its model when it serves.
            cards = [each for each in (store / "v1" / "mdc").rglob("*") if each.is_file()]
            return SERVED.encode() in listed and len(cards) >= num_workers

        url = f"http://{HOST}:{port}"
        _wait(f"{url}/v1/models", processes, is_ready)
        yield Served(name, url, processes, "EngineCore")


@contextmanager
def mesh(of: Mesh, model: Path, dtype: str, folder: Path) -> Iterator[Served]:
    """`kvmesh up`, which divides the cores among engines."""
    port = free_port()
    words = ["--model", str(model), "--model-name", SERVED, "--port", str(port)]
    words += ["--engine", of.engine, "--dtype", dtype, "--num-blocks", str(NUM_BLOCKS)]
    words += ["--prefill", str(of.num_prefill), "--decode", str(of.num_decode)]
    words += ["--tensor-parallel", str(of.num_ranks)] if of.num_ranks > 1 else []
    words += ["--state-dir", str(folder / "state"), "--start-timeout", f"{_START_S:.0f}"]
    command = [sys.executable, "-m", "kvmesh.cli", "up", *words]
    with _process("system", command, {}, folder) as process:
        # The gateway answers from its first worker on; loads, and kills, are for all of them.
        while not process.next_line().startswith("ready: "):
            pass
        yield Served(of.name, f"http://{HOST}:{port}", [process], of.killed_words)


def _engine_words(model: Path, dtype: str) -> list[str]:
    """Options that `vllm serve` and `dynamo.vllm` share."""
    words = ["--model", str(model), "--served-model-name", SERVED]
    return [*words, "--dtype", dtype, "--max-model-len", str(CONTEXT)]


@contextmanager
def _process(
    name: str, command: Sequence[str], environment: dict[str, str], folder: Path
) -> Iterator[Process]:
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"{key}={value}" for key, value in environment.items()]
    process = Process(name, ["env", *words, *command], folder)
    try:
        yield process
    finally:
        process.stop(_STOP_S)


def _wait(
    url: str, processes: Sequence[Process], is_ready: Callable[[bytes], bool] = lambda _body: True
) -> None:
    """Waits until the server answers 200 with a body that says that it is ready."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        for process in processes:
            if not process.running:
                raise RuntimeError(f"{process.name} ended:\n{process.log_end}")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if is_ready(answer.read()):
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise TimeoutError(f"{url} is not ready after {_START_S:.0f} s:\n{processes[0].log_end}")
