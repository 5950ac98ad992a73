"""A mesh of real processes for end-to-end and chaos tests."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import aiohttp

from kvmesh.core.mesh_secret import load_secret, new_secret
from kvmesh.core.types import SamplingParams, SequenceSpec
from kvmesh.engine.fake import FakeRunner
from kvmesh.kv.hashing import root_hash
from kvmesh.metadata.server_binary import RedisProcess
from kvmesh.rpc.channels import MeshAccess
from scripts.try_clients.stack import HELD_NOWHERE
from tests.mesh_child import ROOT, Child, scrape
from tests.one_engine import tokens_of
from tests.redis_server import redis_process
from tests.waiting import until

MODEL_FOLDER = ROOT / "models" / "pydoc-6m"
MODEL = "pydoc"
VOCAB_SIZE = 4096
BLOCK_SIZE = 16

Flags = Mapping[str, object]
NO_FLAGS: Flags = MappingProxyType({})


class Mesh:
    """The processes of one mesh, by name: kvmanager, scheduler, prefill-0, decode-0, gateway, ...

    Args:
        folder: for logs, traces and the mesh's secret.
        engine: as `engine.kind`.
        flags: extra flags by service, or by name for one process.
        is_forked: as in `Child`.
        faulty: workers whose engines can be made ill with `fault`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engine: str = "fake",
        flags: Mapping[str, Flags] | None = None,
        is_forked: bool = False,
        faulty: Collection[str] = (),
    ) -> None:
        self.folder = folder
        self.secret_file = folder / "mesh.secret"
        self.secret_file.write_text(new_secret())
        self.access = MeshAccess(secret=load_secret(str(self.secret_file)))
        self.redis: RedisProcess | None = None
        self.children: dict[str, Child] = {}
        self._engine = engine
        self._flags = flags or {}
        self._is_forked = is_forked
        self._faulty = faulty

    def __getitem__(self, name: str) -> Child:
        return self.children[name]

    @property
    def url(self) -> str:
        """Where the HTTP API is."""
        return f"http://{self['gateway'].address_of('http_serving')}"

    @property
    def workers(self) -> list[Child]:
        """All workers that run."""
        kinds = ("prefill", "decode")
        return [each for each in self.children.values() if each.service in kinds and each.running]

    @property
    def trace_files(self) -> list[Path]:
        """Span files, one per process."""
        return sorted(self.folder.glob("*.jsonl"))

    def add(
        self,
        name: str,
        service: str,
        flags: Flags,
        *,
        sticky: bool = False,
        prefix: tuple[str, ...] = (),
    ) -> Child:
        """Starts a process; `prefix` as in `Child`."""
        everywhere: dict[str, object] = {
            "server.secret-file": self.secret_file,
            "telemetry.metrics-port": 0,
            "telemetry.trace.exporter": "jsonl",
            "telemetry.trace.target": self.folder / f"{name}.jsonl",
        }
        special = {**self._flags.get(service, {}), **self._flags.get(name, {})}
        merged = {**everywhere, **flags, **special}
        child = Child(name, service, merged, self.folder, sticky, prefix, self._is_forked)
        if name in self._faulty:
            child.fault = self.folder / f"{name}.fault"
        self.children[name] = child
        child.start()
        return child

    def fault(self, name: str, what: str) -> None:
        """Makes a worker's engine ill; see `tests/faulty_worker.py`."""
        path = self[name].fault
        assert path is not None, f"{name} cannot be made ill"
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").replace(path)

    def add_worker(self, name: str, more: Flags = NO_FLAGS) -> Child:
        """Starts a worker; its name says which kind.

        Args:
            more: flags in place of the usual ones.
        """
        return self.add(
            name,
            name.partition("-")[0],
            {
                "worker.id": name,
                "worker.scheduler-targets": self["scheduler"].address,
                "worker.kvmanager-target": self["kvmanager"].address,
                "engine.kind": self._engine,
                "engine.model": MODEL_FOLDER,
                "engine.model-name": MODEL,
                "engine.dtype": "float32",
                "engine.block-size": BLOCK_SIZE,
                **more,
            },
        )

    async def start(self, num_prefill: int, num_decode: int) -> None:
        """Starts everything and waits until requests can be served."""
        assert self.redis is not None
        redis = {"redis.url": self.redis.url}
        await self.add("kvmanager", "kvmanager", redis, sticky=True).ready()
        # Handoffs are what most tests are about: short prompts are kept apart too.
        target = {"kvmanager.target": self["kvmanager"].address, "routing.aggregate-tokens": 0}
        # And workers keep the role that their name says.
        target |= {"planning.roles": "off", "planning.substitutes": "off"}
        await self.add("scheduler", "scheduler", {**redis, **target}, sticky=True).ready()
        for service, count in (("prefill", num_prefill), ("decode", num_decode)):
            for number in range(count):
                self.add_worker(f"{service}-{number}")
        flags = {
            "http.port": 0,
            "scheduler.targets": self["scheduler"].address,
            "model.path": MODEL_FOLDER,
            "model.served-name": MODEL,
        }
        self.add("gateway", "gateway", flags, sticky=True)
        for child in self.children.values():
            await child.ready()
        await self.all_known()

    async def restart(self, name: str) -> None:
        """Starts a process that ended and waits until it serves."""
        self[name].start()
        await self[name].ready()

    async def all_known(self) -> None:
        """Waits until scheduler, kvmanager and gateway know all workers that run, connected."""
        count = len(self.workers)

        async def complete() -> bool:
            scheduler = await self["scheduler"].metrics()
            kvmanager = await self["kvmanager"].metrics()
            return (
                scheduler.value("kvmesh_scheduler_workers") == count
                and not scheduler.value("kvmesh_scheduler_connecting_workers")
                and kvmanager.value("kvmesh_kvmanager_streams") == count
                and await self.is_ready()
            )

        await until(complete, f"{count} workers are known")

    async def is_ready(self) -> bool:
        """Whether the gateway says that it can serve."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/ready") as response,
        ):
            return response.status == 200

    async def idle(self) -> None:
        """Waits until no request, reservation, slot, sequence or block is held anywhere."""
        held: dict[str, float] = {}

        async def nothing() -> bool:
            held.clear()
            told = {worker.name: await worker.metrics() for worker in self.workers}
            told["gateway"] = await scrape(f"{self.url}/metrics")
            for owner, metrics in told.items():
                held.update({f"{owner} {name}": metrics.value(name) for name in HELD_NOWHERE})
            return not any(held.values())

        try:
            await until(nothing, "nothing is held")
        except AssertionError as error:
            left = {name: value for name, value in held.items() if value}
            raise AssertionError(f"still held: {left}") from error

    async def stop(self) -> dict[str, int]:
        """Stops what runs; the exit codes by name."""
        running = [child for child in self.children.values() if child.running]
        for child in running:
            child.signal(signal.SIGTERM)
        return {child.name: await child.exit_code() for child in running}

    def reap(self) -> None:
        """Kills what is left."""
        for child in self.children.values():
            if child.process is not None:
                child.process.kill()
                child.process.wait()

    def failures(self) -> list[str]:
        """Log lines of level error and tracebacks, over all lives of all processes."""
        return [
            f"{path.name}: {line}"
            for path in sorted(self.folder.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if '"level": "error"' in line or line.startswith("Traceback")
        ]

    def print_logs(self) -> None:
        """Prints all logs; pytest shows them for a test that failed."""
        for path in sorted(self.folder.glob("*.log")):
            print(f"--- {path.name}")
            print(path.read_text(errors="replace")[-8000:])


@asynccontextmanager
async def running_mesh(
    folder: Path,
    num_prefill: int = 2,
    num_decode: int = 2,
    *,
    engine: str = "fake",
    flags: Mapping[str, Flags] | None = None,
    is_forked: bool = True,
    faulty: Collection[str] = (),
) -> AsyncIterator[Mesh]:
    """A mesh that serves; at the end all that runs must stop with exit code 0 and without errors.

    Args:
        flags: extra flags by service, or by name for one process.
        is_forked, faulty: as in `Mesh`.
    """
    mesh = Mesh(folder, engine=engine, flags=flags, is_forked=is_forked, faulty=faulty)
    async with AsyncExitStack() as stack:
        stack.callback(mesh.print_logs)
        mesh.redis = stack.enter_context(redis_process(folder))
        stack.callback(mesh.reap)
        await mesh.start(num_prefill, num_decode)
        yield mesh
        codes = await mesh.stop()
        assert set(codes.values()) <= {0}, codes
        assert mesh.failures() == []


def fake_tokens(
    prompt: list[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    folder: Path = MODEL_FOLDER,
) -> list[int]:
    """What one fake engine alone generates after a prompt."""
    runner = FakeRunner.for_checkpoint(folder, name=MODEL, num_blocks=1024, block_size=BLOCK_SIZE)
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    spec = SequenceSpec(tuple(prompt), len(prompt), sampling, root_hash("reference"))
    return tokens_of(runner, spec)
