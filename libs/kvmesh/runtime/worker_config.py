"""Configuration that prefill and decode workers share."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option, positive, secret
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import Role
from kvmesh.rpc.channels import PeerTls
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class DataSection:
    """The data channel over the network."""

    lanes: int = option(
        0, "TCP connections per peer; 0: by cores, and by what more or fewer of them gain"
    )
    checksum: str = option("crc32c", "of TCP payloads: crc32c, crc32 or none")
    budget_mb_s: float = option(0.0, "TCP megabytes per second to one peer; 0: no bound")
    egress_mb_s: float = option(0.0, "TCP megabytes per second to all, reads included; 0: no bound")
    window_mb: int = positive(64, "megabytes that one connection may be ahead of its answers")
    copy_threads: int = positive(1, "that share a large copy out of shared memory")
    poll_us: int = option(200, "microseconds to look for the next frame, while that pays; 0: not")
    staging_mb: int = option(
        64, "pinned host memory per direction for blocks of a device, megabytes"
    )
    tls: PeerTls = option(PeerTls, "")
    peers: str = option(
        "", "names in certificates of workers to share KV with, comma-separated; empty: all"
    )


@dataclass(frozen=True, slots=True)
class WorkerSection:
    """Identity, neighbours and limits of a worker."""

    id: str = option("", "stable name; default: role, host and port")
    role: str = option("hybrid", "prefill, decode, hybrid or spare: what the scheduler uses it for")
    cluster: str = option("local", "cluster (datacentre) name")
    scenario: str = option("", "scenario whose requests it serves; empty: those without a group")
    scheduler_targets: str = option("127.0.0.1:7001", "schedulers, host:port, comma-separated")
    kvmanager_target: str = option("127.0.0.1:7002", "kvmanager, host:port; empty: do not publish")
    data_port: int = option(0, "data channel port; 0 picks a free one")
    prefill_slots: int = option(1, "prompts held at once; all others are rejected")
    decode_slots: int = option(32, "sequences held at once, reservations included")
    lease_s: float = positive(10.0, "a reservation without renewal or progress ends after this")
    stall_s: float = positive(5.0, "a transfer without progress fails after this")
    handoff_s: float = positive(60.0, "a link whose handoffs would take longer is given up")
    channels: str = option(
        "local,ipc,shm,tcp", "kinds of data channel that may be used, best first"
    )
    transfer_mode: str = option("auto", "when KV leaves: auto, whole, chunked or layered")

    @property
    def schedulers(self) -> list[str]:
        """`host:port` of every scheduler."""
        targets = (target.strip() for target in self.scheduler_targets.split(","))
        return [target for target in targets if target]


def parse_role(word: str) -> Role:
    """Returns the role that a config names.

    Raises:
        ConfigError: there is no such role.
    """
    try:
        return Role(word)
    except ValueError as error:
        raise ConfigError(
            f"worker.role is one of {', '.join(role.value for role in Role)}, not {word!r}"
        ) from error


@dataclass(frozen=True, slots=True)
class EngineSection:
    """The engine."""

    kind: str = option("kvmesh", "kvmesh, vllm, or fake (deterministic, computes nothing)")
    model: str = option(
        "", "checkpoint folder, or org/name on the Hugging Face hub; a spare without one is empty"
    )
    model_name: str = option(
        "", "name under which the model is served; default: folder name, or org/name"
    )
    lora: str = option("", "LoRA adapters as NAME=FOLDER, comma-separated; with the engine vllm")
    max_loras: int = option(
        0, "LoRA adapters at once, those loaded while it runs included; 0: those of engine.lora"
    )
    max_lora_rank: int = positive(
        16, "longest rank of adapters loaded while it runs; those of engine.lora may need more"
    )
    tensor_parallel: int = positive(
        1, "processes that share each layer of the model by heads; with the engine vllm"
    )
    pipeline_parallel: int = positive(
        1, "parts that the layers are divided into, each with as many processes; with vllm"
    )
    dtype: str = option("auto", "auto, float32, float16 or bfloat16")
    device: str = option("cpu", "cpu or cuda")
    num_blocks: int = positive(1024, "KV blocks")
    block_size: int = positive(16, "token positions per KV block")
    num_threads: int = positive(1, "CPU threads of the engine")
    max_model_len: int = option(0, "longest sequence in tokens; 0: the model's own limit")
    max_batch_tokens: int = positive(512, "tokens computed in one step (chunk budget)")
    growth_tokens: int = option(64, "room for new tokens that a reservation asks for")
    state_interval_tokens: int = option(
        0, "positions between cached states of linear layers; 0: as much room as their KV takes"
    )
    cuda_graphs: str = option(
        "auto", "static decode steps: auto (with a device), on (on the CPU uncaptured) or off"
    )
    max_graph_batch: int = positive(64, "sequences of the largest static decode step")
    swap_gib: float = option(
        -1.0, "host memory for KV of preempted sequences, GiB; 0: none; -1: 4 with a device, else 0"
    )
    fake_step_s: float = option(0.0, "length of a step of the fake engine")
    fake_profile: str = option("", "profile file whose step times the fake engine takes")
    fake_device: str = option("", "device of that profile")
    fake_token_bytes: int = option(8, "KV bytes per token of the fake engine, a multiple of 8")

    @property
    def num_ranks(self) -> int:
        """Processes of the engine."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class FetchSection:
    """KV that workers read from each other's prefix caches."""

    enabled: bool = option(True, "fetch prefixes that routes say other workers hold")
    timeout_s: float = positive(10.0, "a fetch that takes longer is given up, the rest is computed")
    stall_s: float = positive(2.0, "a fetch or query without progress for this long is given up")
    lease_s: float = positive(
        5.0, "blocks leased to a reader are free again so long after its reads"
    )
    max_leases: int = option(64, "leases at once, half to one reader; 0: nothing is given away")
    max_share: float = option(0.5, "of all blocks, in leases at once; half of that to one reader")
    max_stores: int = option(0, "prefixes at once that other programs write here; 0: none may")
    max_queries: int = option(8, "questions about KV here that are open at once, else refused")
    leave_s: float = option(0.0, "a drained worker stays so long for what it holds to be copied")
    query: str = option(
        "auto", "ask where a prefix is instead of computing it: auto (by cost), always, never"
    )


@dataclass(frozen=True, slots=True)
class TiersSection:
    """Tiers for KV that the pool of blocks evicts."""

    host_gib: float = option(
        0.0, "host memory for evicted KV, GiB; useful where it is more than the pool; 0: none"
    )
    disk_gib: float = option(0.0, "disk for KV that host memory evicts, or the pool, GiB; 0: none")
    disk_path: str = option("", "folder on that disk; its file outlives the worker's restart")


@dataclass(frozen=True, slots=True)
class OutsideSection:
    """A Redis or Valkey below the tiers, for KV that workers share; needs the extra `outside`."""

    url: str = option(
        "", "redis://, rediss:// (TLS), unix:// or redis+sentinel:// URL; empty: none"
    )
    password: str = secret("password, if it is not part of the URL")
    password_file: str = option("", "file that holds the password")
    key_prefix: str = option("kvmesh:", "start of all keys")
    timeout_s: float = positive(0.5, "a call that takes longer has failed")
    ttl_s: float = positive(86400.0, "a block that is not used for this long is deleted there")


@dataclass(frozen=True, slots=True)
class EventsSection:
    """KV events for outside indexers, as vLLM publishes them; needs the extra `events`."""

    endpoint: str = option("", "ZMQ PUB address, for example tcp://*:5557; empty: off")
    replay_endpoint: str = option("", "ZMQ ROUTER address for missed batches; empty: none")
    topic: str = option("kv-events", "topic of the messages")
    buffer_batches: int = positive(10_000, "batches kept for the replay")
    encoding: str = option("array", "of an event: array, or map (vLLM 0.28 and later)")
    int_hashes: bool = option(True, "block hashes as 64-bit numbers; else as bytes")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker. Prefill and decode workers differ only in `worker.role`."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    worker: WorkerSection = option(WorkerSection, "")
    data: DataSection = option(DataSection, "")
    engine: EngineSection = option(EngineSection, "")
    events: EventsSection = option(EventsSection, "")
    fetch: FetchSection = option(FetchSection, "")
    tiers: TiersSection = option(TiersSection, "")
    outside: OutsideSection = option(OutsideSection, "")
