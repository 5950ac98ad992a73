"""The systems of `benchmarks.gateway`: processes on free ports, before workers of their own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

import psutil

from benchmarks.bench_process import HOST, Process, free_port
from benchmarks.gateway_load import Loader, request_bytes
from benchmarks.our_mesh import MODEL, OurMesh, model_folder
from kvmesh.core.types import Endpoint

NUM_WORKERS = 3
LOADER_ALONE = "loader alone"
OURS = "kvmesh"
ROLES = "kvmesh, P/D"
UNTOLD = "kvmesh, no telemetry"


class Load(Enum):
    """Kinds of phases."""

    REQUESTS = auto()
    GROWN = auto()
    FIRST_TOKEN = auto()
    TOKENS = auto()
    FEATURES = auto()
    OVERLOAD = auto()
    KILL = auto()
    TOLD = auto()


COMMON = frozenset(Load) - {Load.TOLD}
"""Loads of all systems; with and without telemetry are only ours."""

PLAIN = frozenset({Load.REQUESTS, Load.FIRST_TOKEN, Load.TOKENS})
"""Loads that a worker serves without a gateway or router before it."""


@dataclass(slots=True)
class System:
    """What is measured.

    Attributes:
        front: the processes that clients talk to, and that a rival is compared by.
        control: processes behind them that take part in each request, workers apart.
        loads: it takes part in phases of these kinds.
    """

    name: str
    endpoint: Endpoint
    front: list[Process]
    workers: list[Process]
    control: list[Process] = field(default_factory=list)
    redis_pid: int | None = None
    loads: frozenset[Load] = COMMON

    async def behave(self, **behaviour: object) -> None:
        """Sets how fast the workers that live are."""
        for worker in self.workers:
            if worker.running:
                worker.tell(behaviour)
                while await worker.line() != "changed":
                    pass

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds so far: of the front, and of front, control and Redis together."""
        front = sum(process.cpu_s for process in self.front)
        behind = sum(process.cpu_s for process in self.control)
        if self.redis_pid is not None:
            times = psutil.Process(self.redis_pid).cpu_times()
            behind += times.user + times.system
        return front, front + behind

    @property
    def all_cpu_s(self) -> float:
        """Processor seconds so far of all of it, the workers that live included."""
        # A bare worker is its own front.
        workers = (each for each in self.workers if each.running and each not in self.front)
        return self.cpu_s()[1] + sum(each.cpu_s for each in workers)


Start = Callable[[Path], AbstractAsyncContextManager[System]]


async def _answers(system: System) -> None:
    loader = Loader(system.endpoint)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    try:
        await loader.until_ok(
            request_bytes(system.endpoint, body), lambda: all(p.running for p in system.front)
        )
    finally:
        loader.close()


def ours(
    name: str = OURS,
    *,
    num_processes: int = 1,
    roles: bool = False,
    told: bool = True,
    loads: frozenset[Load] = frozenset(Load),
    tekken: Path | None = None,
) -> Start:
    """Our gateway, scheduler, kvmanager and Redis before workers that speak our protocol.

    Args:
        roles: a prefill and a decode worker instead of workers that are both.
        told: with logs, metrics and traces as `kvmesh up` ships them.
        loads: it takes part in phases of these kinds.
        tekken: a large vocabulary in place of the checkpoint's own.
    """

    @asynccontextmanager
    async def start(folder: Path) -> AsyncIterator[System]:
        with ExitStack() as stack:
            mesh = OurMesh(stack, folder, traced=told, measured=told, tekken=tekken)
            words = ["roles"] if roles else []
            # A pair shares its memory, so there is one.
            count = 1 if roles else NUM_WORKERS
            workers = [mesh.worker(f"worker-{number}", *words) for number in range(count)]
            flags = {"http.processes": num_processes} if num_processes > 1 else {}
            front, http = mesh.gateway("0", flags)
            pid = mesh.redis.pid
            system = System(name, http, [front], workers, mesh.control, pid, loads)
            for worker in workers:
                await worker.line()
            await _answers(system)
            yield system

    return start


@asynccontextmanager
async def bare_worker(folder: Path) -> AsyncIterator[System]:
    """The loader in front of one worker, with nothing between: what is not the fronts' share."""
    with ExitStack() as stack:
        worker = _python(stack, folder, "openai_worker", "openai-alone", named=False)
        http = Endpoint(HOST, int(await worker.line()))
        yield System(LOADER_ALONE, http, [worker], [worker], loads=PLAIN)


def router(name: str, python: Path) -> Start:
    """A router that proxies to OpenAI servers: sglang-router or vllm-router.

    Args:
        python: interpreter of the environment that has it.
    """

    @asynccontextmanager
    async def start(folder: Path) -> AsyncIterator[System]:
        with ExitStack() as stack:
            workers = [
                _python(stack, folder, "openai_worker", f"openai-{number}", named=False)
                for number in range(NUM_WORKERS)
            ]
            urls = [f"http://{HOST}:{await worker.line()}" for worker in workers]
            http = Endpoint(HOST, free_port())
            module = name.replace("-", "_")
            words = ["--host", HOST, "--port", str(http.port), "--policy", "round_robin"]
            words += ["--prometheus-port", str(free_port()), "--log-level", "error"]
            command = [str(python), "-m", f"{module}.launch_router", *words]
            command += ["--worker-urls", *urls]
            front = [_entered(stack, Process(name, command, folder, folder))]
            system = System(name, http, front, workers)
            await _answers(system)
            yield system

    return start


def dynamo(python: Path, tekken: Path | None = None) -> Start:
    """Dynamo's frontend with its key-value store in files, before workers of its runtime.

    Args:
        python: interpreter of the environment that has `ai-dynamo`.
        tekken: a large vocabulary in place of the checkpoint's own.
    """

    @asynccontextmanager
    async def start(folder: Path) -> AsyncIterator[System]:
        store = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "store"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "error",
        }
        words = [f"{name}={value}" for name, value in store.items()]
        script = str(Path(__file__).with_name("dynamo_worker.py"))
        model = str(model_folder(folder, tekken))
        with ExitStack() as stack:
            workers = [
                _entered(
                    stack,
                    Process(
                        f"dynamo-{number}",
                        ["env", *words, str(python), script, model, MODEL],
                        folder,
                        folder,
                    ),
                )
                for number in range(NUM_WORKERS)
            ]
            http = Endpoint(HOST, free_port())
            command = [str(python), "-m", "dynamo.frontend", "--http-port", str(http.port)]
            command += ["--http-host", HOST, "--router-mode", "round-robin"]
            front = [_entered(stack, Process("dynamo", ["env", *words, *command], folder, folder))]
            system = System("dynamo", http, front, workers)
            for worker in workers:
                await worker.line()
            await _answers(system)
            yield system

    return start


def _entered(stack: ExitStack, process: Process) -> Process:
    stack.callback(process.stop)
    return process


def _python(
    stack: ExitStack, folder: Path, module: str, name: str, *words: str, named: bool = True
) -> Process:
    """A script of this folder under this interpreter."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *([name] if named else []), *words]
    return _entered(stack, Process(name, command, folder))
