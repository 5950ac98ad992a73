"""Plans a local stack: its processes and their flags. Pure.

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
from kvmesh.engine.device_names import DeviceTurns

# Order of stopping: the gateway first, then workers, then the services that know about them.
_STOP_RANK = {"gateway": 0, "prefill": 1, "decode": 1, "scheduler": 2, "kvmanager": 3, "redis": 4}
_LOCAL = "127.0.0.1"
_CLUSTER = "local"
_USES_REDIS = ("kvmanager", "scheduler", "gateway")
_REDIS_URL, _REDIS_PASSWORD = "KVMESH_REDIS__URL", "KVMESH_REDIS__PASSWORD"
TRACES_PER_SECOND = 5
"""Traces per second of each service: enough for every request of a trial, and cheap under load."""
REMOTE = "remote"
"""Name of the second cluster, and prefix of its workers' names."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """A second cluster, which prefills long prompts and sends their KV home over a paced link.

    Attributes:
        num_prefill: number of its workers.
        link_mbit: its egress bandwidth in megabits per second.
        threshold_tokens: initial threshold: uncached tokens above which prompts go there.
    """

    num_prefill: int
    link_mbit: int
    threshold_tokens: int

    @property
    def link_mb_s(self) -> float:
        """Its egress bandwidth in megabytes per second."""
        return self.link_mbit / 8


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A further model, with as many prefill and decode workers as the stack's first model.

    Attributes:
        names: names that clients use; its workers use the first one.
    """

    names: tuple[str, ...]
    folder: Path
    dtype: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The stack to start.

    Attributes:
        others: further models.
        remote: the second cluster; None: there is only one cluster.
        redis_url: URL of a running Redis; empty: the stack starts one.
        console_port: admin port of the gateway, with the console; 0 picks a free one.
        grpc_port: gRPC port of the gateway; 0 picks a free one.
        num_threads: computing threads of each engine, and of each of its ranks.
        shares_cores: whether engines divide the cores among those that have work instead.
        drain_s: seconds that a service may finish its work when it is stopped.
        num_spare: number of spare workers, which replace lost ones.
        num_empty: number of spares that load a model only then.
        aliases: further names of the model, comma-separated.
        lora: see `read_adapters`; folders are absolute.
        max_loras: number of adapters that each engine of the first model holds at once.
        tensor_parallel: number of ranks of each engine that share a layer.
        pipeline_parallel: number of parts of its layers.
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
    num_empty: int = 0
    aliases: str = ""
    lora: str = ""
    max_loras: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    shares_cores: bool = False
    others: tuple[OtherModel, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Processes of each engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_workers(self) -> int:
        """Number of engines on this machine."""
        far = 0 if self.remote is None else self.remote.num_prefill
        pairs = (1 + len(self.others)) * (self.num_prefill + self.num_decode)
        return pairs + self.num_spare + self.num_empty + far

    @property
    def fleets(self) -> tuple[StackOptions, ...]:
        """The options of each model alone; the first has spares, adapters and second cluster."""
        own = replace(self, others=())
        bare = replace(own, remote=None, num_spare=0, num_empty=0)
        bare = replace(bare, aliases="", lora="", max_loras=0)
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
    """Paths of a stack.

    Attributes:
        root: checkout that contains `services`.
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
        probe: succeeds when the process is ready for work.
        liveness: succeeds as long as the process lives, whatever the state of its peers.
        metrics_port: port of its metrics; 0 if it has none.
        launch: specification that a worker was started with; None for other services.
    """

    spec: ProcessSpec
    probe: Probe
    liveness: Probe
    metrics_port: int = 0
    launch: LaunchSpec | None = None

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker: other workers do its work while it is down."""
        return self.launch is not None


MakeWorker = Callable[[str, LaunchSpec], Member]
"""Function from a worker's name and specification to its process."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """All processes, in the order of starting.

    Attributes:
        has_chat: whether the model has a chat template.
        console: address of the gateway's admin port; None without one.
        pool: address of the kvmanager's admin port; None without one.
        secret_file: path of the file with the mesh's secret.
        launcher: address at which the scheduler asks for more or fewer workers; None without it.
        make_worker: plans one more worker.
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
    devices: DeviceTurns
    # Passed in the environment, because every user of the machine can read flags.
    store: Mapping[str, str] = field(default_factory=dict)

    def stores(self) -> list[Member]:
        """Returns the Redis that the stack starts, if any; sets `store` for its users."""
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
        """Returns a service with the flags common to all services, and its gRPC endpoint."""
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
        """Returns the flags of a worker of the stack's first model."""
        return self.fleet_flags(self.options, name, scheduler, kvmanager)

    def fleet_flags(
        self, options: StackOptions, name: str, scheduler: Endpoint, kvmanager: Endpoint
    ) -> dict[str, object]:
        """Returns the flags of a worker of one model."""
        return {
            "worker.id": name,
            "worker.cluster": _CLUSTER,
            "worker.scheduler-targets": scheduler,
            "worker.kvmanager-target": kvmanager,
            "engine.kind": options.engine,
            "engine.model": options.model,
            "engine.model-name": options.model_name,
            "engine.lora": options.lora,
            "engine.max-loras": options.max_loras,
            "engine.tensor-parallel": options.tensor_parallel,
            "engine.pipeline-parallel": options.pipeline_parallel,
            "engine.dtype": options.dtype,
            "engine.device": self.devices.take(options.num_ranks),
            "engine.num-blocks": options.num_blocks,
            "engine.block-size": options.block_size,
            "engine.num-threads": options.num_threads,
            "engine.cores-file": self.paths.state / "cores" if options.shares_cores else "",
            "engine.max-model-len": options.max_model_len,
        }

    def worker(
        self, name: str, launch: LaunchSpec, scheduler: Endpoint, kvmanager: Endpoint
    ) -> Member:
        """Returns a worker of the first cluster.

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

    def empty_spare(self, name: str, scheduler: Endpoint, kvmanager: Endpoint) -> Member:
        """Returns a spare of the first cluster that has no model yet."""
        flags = self.worker_flags(name, scheduler, kvmanager)
        del flags["engine.model"], flags["engine.model-name"]
        flags["worker.role"] = Role.SPARE.value
        return replace(self.service("decode", flags, name)[0], launch=LaunchSpec(Role.SPARE))

    def home_members(self, scheduler: Endpoint, kvmanager: Endpoint) -> list[Member]:
        """Returns the initial workers of the first cluster.

        Their numbers continue from model to model. Spares load the first model, or none yet, and
        get no requests until a worker is lost.
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
        for index in range(self.options.num_empty):
            members.append(self.empty_spare(f"empty-{index}", scheduler, kvmanager))
        return members

    def offload_flags(self) -> dict[str, object]:
        """Returns the scheduler's flags about the second cluster."""
        remote = self.options.remote
        if remote is None:
            return {}
        return {
            "planning.remote-cluster": REMOTE,
            "planning.egress-mb-s": remote.link_mb_s,
            "planning.threshold-tokens": remote.threshold_tokens,
        }

    def remote_members(self, scheduler: Endpoint, kvmanager: Endpoint) -> list[Member]:
        """Returns the workers of the second cluster, each with its share of the link's bandwidth.

        They use TCP only, so that no faster channel bypasses the link.
        """
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
    """Plans the processes of a stack.

    Args:
        options: the stack to start.
        paths: its folders and programs.
        next_port: returns a different free port each time.
        env: environment of all processes.
        secrets: secrets of the stack.
    """
    planner = _Planner(options, paths, next_port, env, secrets, DeviceTurns(options.device))
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
    """Returns the computing threads per engine; two spinning teams on one core are ten times
    slower.
    """
    return max(1, cores // max(1, num_engines))


def engine_environment(num_threads: int) -> dict[str, str]:
    """Returns the environment variables of all processes; workers set how engine threads wait."""
    return {"OMP_NUM_THREADS": str(num_threads), "PYTHONUNBUFFERED": "1"}
