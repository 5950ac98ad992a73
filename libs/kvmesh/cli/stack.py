"""The local stack as a plan: which processes with which flags; pure.

Tests: tests/unit/cli/test_stack.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvmesh.cli.probes import Probe
from kvmesh.cli.processes import ProcessSpec
from kvmesh.cli.stack_secrets import StackSecrets
from kvmesh.core.launch import LaunchError, LaunchSpec
from kvmesh.core.types import Endpoint, Role
from kvmesh.engine.chat_template import read_chat_template

# Clients first, then those who hold their work, then those who know about it.
_STOP_RANK = {"gateway": 0, "prefill": 1, "decode": 1, "scheduler": 2, "kvmanager": 3, "redis": 4}
_LOCAL = "127.0.0.1"
_CLUSTER = "local"
_USES_REDIS = ("kvmanager", "scheduler", "gateway")
_REDIS_URL, _REDIS_PASSWORD = "KVMESH_REDIS__URL", "KVMESH_REDIS__PASSWORD"
TRACES_PER_SECOND = 5
"""Who tries something out finds every request's trace; under load they cost little."""
REMOTE = "remote"
"""Name of the second cluster, and what the names of its workers begin with."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """A second cluster, which prefills long prompts and sends their KV home over a paced link.

    Attributes:
        num_prefill: its workers.
        link_mbit: megabits per second that leave it.
        threshold_tokens: longer uncached prompts go there at first.
    """

    num_prefill: int
    link_mbit: int
    threshold_tokens: int

    @property
    def link_mb_s(self) -> float:
        """Megabytes per second that leave it."""
        return self.link_mbit / 8


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A further model, with as many workers for prefill and decode as the stack's own.

    Attributes:
        names: that clients use; the first one is what its workers call it.
    """

    names: tuple[str, ...]
    folder: Path
    dtype: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What to start.

    Attributes:
        others: further models.
        remote: a second cluster; None for one.
        redis_url: a server that runs already; empty starts one.
        console_port: admin port of the gateway, which has the console; 0 takes a free one.
        grpc_port: of the gateway; 0 takes a free one.
        num_threads: computing threads of each engine.
        drain_s: how long a service may finish running work when it is stopped.
        num_spare: workers that wait for the place of one that is lost.
        aliases: further names of the model, comma-separated.
        lora: see `read_adapters`; folders are absolute.
    """

    model: Path
    model_name: str
    num_prefill: int
    num_decode: int
    host: str
    http_port: int
    engine: str
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    max_model_len: int
    num_threads: int
    redis_url: str
    drain_s: float
    console_port: int = 0
    grpc_port: int = 0
    remote: RemoteOptions | None = None
    num_spare: int = 0
    aliases: str = ""
    lora: str = ""
    others: tuple[OtherModel, ...] = ()

    @property
    def num_workers(self) -> int:
        """Engines on this machine."""
        far = 0 if self.remote is None else self.remote.num_prefill
        pairs = (1 + len(self.others)) * (self.num_prefill + self.num_decode)
        return pairs + self.num_spare + far

    @property
    def fleets(self) -> tuple[StackOptions, ...]:
        """The same for each model alone; spares, adapters and a second cluster are the first's."""
        own = replace(self, others=())
        bare = replace(own, remote=None, num_spare=0, aliases="", lora="")
        return (
            own,
            *(
                replace(
                    bare,
                    model=each.folder,
                    model_name=each.names[0],
                    dtype=each.dtype,
                    max_model_len=each.max_model_len,
                )
                for each in self.others
            ),
        )


@dataclass(frozen=True, slots=True)
class StackPaths:
    """Where things are.

    Attributes:
        root: checkout that holds `services`.
        state: folder for logs, traces and the description of the running stack.
    """

    root: Path
    state: Path
    python: Path
    redis_binary: Path | None

    @property
    def logs(self) -> Path:
        """Folder of the logs."""
        return self.state / "logs"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the stack.

    Attributes:
        probe: answers when the process is ready for work.
        liveness: answers as long as the process lives, whatever becomes of its peers.
        metrics_port: 0 if it has none.
        launch: what it was started as, of a worker: others do its work while it is away.
    """

    spec: ProcessSpec
    probe: Probe
    liveness: Probe
    metrics_port: int = 0
    launch: LaunchSpec | None = None

    @property
    def is_worker(self) -> bool:
        """Whether others do its work while it is away."""
        return self.launch is not None


MakeWorker = Callable[[str, LaunchSpec], Member]
"""The process of a worker of a name."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes, in the order of starting.

    Attributes:
        has_chat: the model has a chat template.
        console: where the gateway's admin port is; None without one.
        pool: where the kvmanager's admin port is; None without one.
        secret_file: holds the mesh's secret.
        launcher: where the scheduler asks for more workers and fewer; None if it cannot.
        make_worker: plans one more.
    """

    members: tuple[Member, ...]
    http: Endpoint
    grpc: Endpoint
    model_name: str
    has_chat: bool = False
    console: Endpoint | None = None
    pool: Endpoint | None = None
    secret_file: str = ""
    launcher: Endpoint | None = None
    make_worker: MakeWorker | None = None


@dataclass(slots=True)
class _Planner:
    options: StackOptions
    paths: StackPaths
    next_port: Callable[[], int]
    env: Mapping[str, str]
    secrets: StackSecrets
    # In the environment and not in flags, which every user of the machine can read.
    store: Mapping[str, str] = field(default_factory=dict)

    def stores(self) -> list[Member]:
        """The Redis of this stack, if it does not use another one; those who use it are told."""
        if self.options.redis_url:
            self.store = {_REDIS_URL: self.options.redis_url}
            return []
        endpoint = Endpoint(_LOCAL, self.next_port())
        password = self.secrets.redis_password
        self.store = {_REDIS_URL: f"redis://{endpoint}/0", _REDIS_PASSWORD: password}
        return [self._redis(endpoint)]

    def _redis(self, endpoint: Endpoint) -> Member:
        assert self.paths.redis_binary is not None
        argv = (
            *(str(self.paths.redis_binary), str(self.secrets.redis_file)),
            *("--bind", endpoint.host, "--port", str(endpoint.port)),
            *("--save", "", "--appendonly", "no", "--dir", str(self.paths.state)),
        )
        probe = Probe("redis", endpoint, self.secrets.redis_password)
        return Member(self._spec("redis", "redis", argv), probe, probe)

    def service(
        self,
        kind: str,
        flags: Mapping[str, object],
        name: str = "",
        probe: Probe | None = None,
        port: int = 0,
    ) -> tuple[Member, Endpoint]:
        """A service with the flags that all of them take, and its gRPC endpoint."""
        name = name or kind
        endpoint = Endpoint(_LOCAL, port or self.next_port())
        metrics_port = self.next_port()
        common = {
            "server.host": endpoint.host,
            "server.port": endpoint.port,
            "server.secret-file": self.secrets.mesh_file,
            "server.drain-s": self.options.drain_s,
            "telemetry.log.format": "text",
            "telemetry.trace.exporter": "jsonl",
            "telemetry.trace.target": self.paths.state / "traces" / f"{name}.jsonl",
            "telemetry.trace.per-second": TRACES_PER_SECOND,
            "telemetry.metrics-port": metrics_port,
        }
        argv = [str(self.paths.python), "-m", f"services.{kind}"]
        for flag, value in {**common, **flags}.items():
            argv += [f"--{flag}", str(value)]
        spec = self._spec(name, kind, tuple(argv))
        health = Probe("grpc", endpoint)
        return Member(spec, probe or health, health, metrics_port), endpoint

    def _spec(self, name: str, kind: str, argv: tuple[str, ...]) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=argv,
            cwd=self.paths.root,
            log_path=self.paths.logs / f"{name}.log",
            stop_rank=_STOP_RANK[kind],
            env={**self.env, **self.store} if kind in _USES_REDIS else self.env,
        )

    def worker_flags(
        self, name: str, scheduler: Endpoint, kvmanager: Endpoint
    ) -> dict[str, object]:
        """Flags of a worker of the stack's own model."""
        return self.fleet_flags(self.options, name, scheduler, kvmanager)

    def fleet_flags(
        self, options: StackOptions, name: str, scheduler: Endpoint, kvmanager: Endpoint
    ) -> dict[str, object]:
        """Flags of a worker of one model."""
        return {
            "worker.id": name,
            "worker.cluster": _CLUSTER,
            "worker.scheduler-targets": scheduler,
            "worker.kvmanager-target": kvmanager,
            "engine.kind": options.engine,
            "engine.model": options.model,
            "engine.model-name": options.model_name,
            "engine.lora": options.lora,
            "engine.dtype": options.dtype,
            "engine.device": options.device,
            "engine.num-blocks": options.num_blocks,
            "engine.block-size": options.block_size,
            "engine.num-threads": options.num_threads,
            "engine.max-model-len": options.max_model_len,
        }

    def worker(
        self, name: str, launch: LaunchSpec, scheduler: Endpoint, kvmanager: Endpoint
    ) -> Member:
        """A worker of this cluster.

        Raises:
            LaunchError: this stack has no such model.
        """
        models = {fleet.model_name: fleet for fleet in self.options.fleets}
        fleet = models.get(launch.model or self.options.model_name)
        if fleet is None:
            raise LaunchError(f"no model {launch.model!r} in this stack; it has {list(models)}")
        kind = "prefill" if launch.role is Role.PREFILL else "decode"
        flags = self.fleet_flags(fleet, name, scheduler, kvmanager)
        if launch.role.value != kind:
            flags["worker.role"] = launch.role.value
        if launch.scenario:
            flags["worker.scenario"] = launch.scenario
        if launch.checkpoint:
            flags["engine.model"] = launch.checkpoint
        return replace(self.service(kind, flags, name)[0], launch=launch)

    def home_members(self, scheduler: Endpoint, kvmanager: Endpoint) -> list[Member]:
        """The workers that the stack begins with, but those of the second cluster.

        Numbers go on from model to model. Spares have the first model and take nothing until
        somebody is lost.
        """
        members: list[Member] = []
        for number, fleet in enumerate(self.options.fleets):
            model = fleet.model_name if number else ""
            decode = Role.DECODE if fleet.num_prefill else Role.HYBRID
            wanted = (
                ("prefill", Role.PREFILL, fleet.num_prefill),
                ("decode", decode, fleet.num_decode),
            )
            members += [
                self.worker(f"{word}-{index}", LaunchSpec(role, model=model), scheduler, kvmanager)
                for word, role, count in wanted
                for index in range(number * count, (number + 1) * count)
            ]
        spare = LaunchSpec(Role.SPARE)
        for index in range(self.options.num_spare):
            members.append(self.worker(f"spare-{index}", spare, scheduler, kvmanager))
        return members

    def offload_flags(self) -> dict[str, object]:
        """What the scheduler knows of the second cluster."""
        remote = self.options.remote
        if remote is None:
            return {}
        return {
            "planning.remote-cluster": REMOTE,
            "planning.egress-mb-s": remote.link_mb_s,
            "planning.threshold-tokens": remote.threshold_tokens,
        }

    def remote_members(self, scheduler: Endpoint, kvmanager: Endpoint) -> list[Member]:
        """The second cluster: each worker has its share of the link, and no way around it."""
        remote = self.options.remote
        if remote is None:
            return []
        members: list[Member] = []
        for index in range(remote.num_prefill):
            name = f"{REMOTE}-{index}"
            flags = self.worker_flags(name, scheduler, kvmanager) | {
                "worker.cluster": REMOTE,
                "worker.channels": "tcp",
                "data.egress-mb-s": remote.link_mb_s / remote.num_prefill,
            }
            member, _ = self.service("prefill", flags, name)
            members.append(replace(member, launch=LaunchSpec(Role.PREFILL)))
        return members


def plan_stack(
    options: StackOptions,
    paths: StackPaths,
    next_port: Callable[[], int],
    env: Mapping[str, str],
    secrets: StackSecrets,
) -> StackPlan:
    """The processes of a stack.

    Args:
        options: what to start.
        paths: where things are.
        next_port: gives a free port, another one each time.
        env: environment of all processes.
        secrets: of the stack.
    """
    planner = _Planner(options, paths, next_port, env, secrets)
    members = planner.stores()
    pool = Endpoint(_LOCAL, next_port())
    flags: dict[str, object] = {"server.admin.port": pool.port}
    member, kvmanager = planner.service("kvmanager", flags)
    members.append(member)
    launcher = Endpoint(_LOCAL, next_port())
    flags = {"kvmanager.target": kvmanager, "launcher.target": launcher, **planner.offload_flags()}
    member, scheduler = planner.service("scheduler", flags)
    members.append(member)
    members += planner.home_members(scheduler, kvmanager)
    members += planner.remote_members(scheduler, kvmanager)
    http = Endpoint(options.host, options.http_port or next_port())
    asked = Endpoint(_LOCAL if options.host == "0.0.0.0" else options.host, http.port)
    console = Endpoint(_LOCAL, options.console_port or next_port())
    flags = {
        "server.admin.port": console.port,
        "scheduler.targets": scheduler,
        "http.host": http.host,
        "http.port": http.port,
        "model.path": options.model,
        "model.served-name": options.model_name,
        "model.aliases": options.aliases,
        "model.others": ",".join(
            f"{name}={each.folder}" for each in options.others for name in each.names
        ),
    }
    member, grpc = planner.service(
        "gateway", flags, probe=Probe("http", asked), port=options.grpc_port
    )
    members.append(member)
    has_chat = bool(read_chat_template(Path(options.model)))
    secret, name = str(secrets.mesh_file), options.model_name

    def make_worker(worker: str, launch: LaunchSpec) -> Member:
        return planner.worker(worker, launch, scheduler, kvmanager)

    found = tuple(members)
    plan = StackPlan(found, asked, grpc, name, has_chat, console, pool, secret)
    return replace(plan, launcher=launcher, make_worker=make_worker)


def engine_threads(cores: int, num_engines: int) -> int:
    """Computing threads per engine; two spinning teams on one core cost a factor of ten."""
    return max(1, cores // max(1, num_engines))


def engine_environment(num_threads: int) -> dict[str, str]:
    """Variables of all processes; how an engine's threads wait is the worker's own affair."""
    return {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
