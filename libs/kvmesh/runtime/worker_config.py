"""Configuration that prefill and decode workers share."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option, positive, secret
from kvmesh.core.errors import ConfigError
from kvmesh.core.named_values import listed
from kvmesh.core.types import Role
from kvmesh.rpc.channels import PeerTls
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class DataSection:
    """The data channel over the network."""

    lanes: int = option(
        0,
        "TCP connections per peer; 0: chosen from the number of cores and the measured throughput",
    )
    checksum: str = option("crc32c", "checksum of TCP payloads: crc32c, crc32 or none")
    budget_mb_s: float = option(
        0.0, "maximum megabytes per second over TCP to one peer; 0: no limit"
    )
    egress_mb_s: float = option(
        0.0,
        "maximum megabytes per second over TCP to all peers together, reads by peers "
        "included; 0: no limit",
    )
    window_mb: int = positive(64, "maximum unacknowledged megabytes per connection")
    copy_threads: int = positive(1, "threads that share a large copy from shared memory")
    poll_us: int = option(
        200,
        "maximum microseconds of busy polling for the next frame, used only while it pays "
        "off; 0: none",
    )
    staging_mb: int = option(
        64, "megabytes of pinned host memory per direction, for staging blocks of a device"
    )
    tls: PeerTls = option(PeerTls, "")
    peers: str = option(
        "",
        "certificate names of the workers that may share KV with this one, "
        "comma-separated; empty: all",
    )


@dataclass(frozen=True, slots=True)
class WorkerSection:
    """Identity, neighbours and limits of a worker."""

    id: str = option("", "unique, stable name of the worker; empty: role, host and port")
    role: str = option("hybrid", "role of the worker at start: prefill, decode, hybrid or spare")
    cluster: str = option("local", "name of the worker's cluster (datacentre)")
    scenario: str = option(
        "", "scenario whose requests the worker serves; empty: requests without a scenario"
    )
    scheduler_targets: str = option("127.0.0.1:7001", "schedulers as host:port, comma-separated")
    kvmanager_target: str = option(
        "127.0.0.1:7002", "kvmanager as host:port; empty: cached blocks are not published"
    )
    data_port: int = option(0, "port of the data channel; 0 picks a free one")
    prefill_slots: int = option(1, "maximum concurrent prompts; further ones are rejected")
    decode_slots: int = option(32, "maximum concurrent sequences, reservations included")
    lease_s: float = positive(
        10.0, "seconds without renewal or progress after which a reservation ends"
    )
    stall_s: float = positive(5.0, "seconds without progress after which a transfer fails")
    handoff_s: float = positive(
        60.0, "maximum seconds that a transfer may still need at its measured speed; else it fails"
    )
    channels: str = option(
        "local,ipc,shm,tcp", "allowed kinds of data channel, comma-separated, preferred ones first"
    )
    transfer_mode: str = option(
        "auto", "unit in which KV is sent: auto, whole (prompt), chunked or layered"
    )

    @property
    def schedulers(self) -> tuple[str, ...]:
        """`host:port` of every scheduler."""
        return listed(self.scheduler_targets)


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
        "",
        "checkpoint folder, or org/name on the Hugging Face hub; empty only for a spare "
        "without a model",
    )
    model_name: str = option("", "name of the served model; empty: the folder name, or org/name")
    lora: str = option("", "LoRA adapters as NAME=FOLDER, comma-separated; engine vllm only")
    max_loras: int = option(
        0, "maximum LoRA adapters, those loaded at run time included; 0: only those of engine.lora"
    )
    max_lora_rank: int = positive(
        16, "maximum rank of adapters loaded at run time; adapters of engine.lora may raise it"
    )
    tensor_parallel: int = positive(
        1, "tensor-parallel size: processes that share each layer by heads; engine vllm only"
    )
    pipeline_parallel: int = positive(
        1,
        "pipeline-parallel size: stages of layers, each with tensor_parallel processes; "
        "engine vllm only",
    )
    hosts: int = positive(
        1,
        "hosts that compute the engine's ranks, as many on each; the others run services.rank; "
        "engine vllm only",
    )
    ranks_port: int = option(
        0, "port at which other hosts of the engine connect to this worker; 0 picks a free one"
    )
    dtype: str = option("auto", "auto, float32, float16 or bfloat16")
    device: str = option(
        "cpu", "cpu, cuda or cuda:N; ranks after the first take the devices after it"
    )
    num_blocks: int = positive(1024, "number of KV blocks")
    block_size: int = positive(16, "token positions per KV block")
    num_threads: int = positive(1, "CPU threads of the engine")
    cores_file: str = option(
        "",
        "file that the engines of one machine share; each then has an equal part of the cores "
        "among those with work, instead of num_threads; engine kvmesh on the CPU only, with "
        "128 MiB of weights or more",
    )
    max_model_len: int = option(
        0, "maximum tokens of a sequence, prompt and answer; 0: the model's own limit"
    )
    max_batch_tokens: int = positive(512, "maximum tokens computed per step (chunk budget)")
    growth_tokens: int = option(64, "tokens beyond the prompt for which a reservation takes blocks")
    state_interval_tokens: int = option(
        0,
        "tokens between cached states of linear-attention layers; 0: chosen so that the "
        "states take as much memory as the KV",
    )
    cuda_graphs: str = option(
        "auto",
        "static decode steps: auto (on a GPU), on (also on the CPU, without capture) or off; with "
        "engine vllm: auto or off",
    )
    max_graph_batch: int = positive(64, "maximum batch size of static decode steps")
    swap_gib: float = option(
        -1.0,
        "GiB of host memory for the KV of preempted sequences; 0: none; -1: 4 on a GPU, 0 "
        "on the CPU",
    )
    fake_step_s: float = option(0.0, "seconds per step of the fake engine")
    fake_profile: str = option("", "profile file with the step times of the fake engine")
    fake_device: str = option("", "device whose times are taken from that profile")
    fake_token_bytes: int = option(8, "KV bytes per token of the fake engine, a multiple of 8")

    @property
    def num_ranks(self) -> int:
        """Processes of the engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def host_ranks(self) -> int:
        """Processes of the engine on this host."""
        return self.num_ranks // self.hosts


@dataclass(frozen=True, slots=True)
class FetchSection:
    """KV that workers read from each other's prefix caches."""

    enabled: bool = option(True, "fetch prefixes from other workers if a route names a holder")
    timeout_s: float = positive(
        10.0, "timeout of a fetch in seconds; the rest of the prefix is then computed"
    )
    stall_s: float = positive(2.0, "seconds without progress after which a fetch or query ends")
    lease_s: float = positive(
        5.0, "seconds after a reader's last read until its lease on blocks ends"
    )
    max_leases: int = option(
        64, "maximum open leases, at most half of them to one host; 0: other workers cannot read"
    )
    max_share: float = option(
        0.5, "maximum fraction of all blocks under lease, at most half of that to one host"
    )
    max_stores: int = option(0, "maximum concurrent stores by other programs; 0: they cannot store")
    max_queries: int = option(
        8, "maximum concurrent attention queries of other workers; further ones are refused"
    )
    leave_s: float = option(
        0.0, "seconds that a drained worker stays, so that prefixes which only it holds are copied"
    )
    query: str = option(
        "auto",
        "query a prefix at its holder instead of computing it: auto (by cost), always or never",
    )


@dataclass(frozen=True, slots=True)
class TiersSection:
    """Tiers for KV that the pool of blocks evicts."""

    host_gib: float = option(
        0.0, "GiB of host memory for evicted KV; useful if larger than the pool; 0: none"
    )
    disk_gib: float = option(
        0.0,
        "GiB of disk for KV evicted from host memory, or from the pool if there is no "
        "host tier; 0: none",
    )
    disk_path: str = option(
        "", "folder for the disk tier; its file is kept over restarts of the worker"
    )


@dataclass(frozen=True, slots=True)
class OutsideSection:
    """A Redis or Valkey below the tiers, for KV that workers share; needs the extra `outside`."""

    url: str = option(
        "", "redis://, rediss:// (TLS), unix:// or redis+sentinel:// URL; empty: none"
    )
    password: str = secret("Redis password, if the URL does not contain it")
    password_file: str = option("", "file with the Redis password")
    key_prefix: str = option("kvmesh:", "prefix of all keys")
    timeout_s: float = positive(0.5, "timeout of one call, in seconds")
    ttl_s: float = positive(
        86400.0, "seconds without use after which a block is deleted from the store"
    )


@dataclass(frozen=True, slots=True)
class EventsSection:
    """KV events for outside indexers, as vLLM publishes them; needs the extra `events`."""

    endpoint: str = option(
        "", "ZMQ PUB address for KV events, for example tcp://*:5557; empty: off"
    )
    replay_endpoint: str = option(
        "", "ZMQ ROUTER address at which subscribers request missed batches; empty: none"
    )
    topic: str = option("kv-events", "topic of the messages")
    buffer_batches: int = positive(10_000, "number of batches kept for replay")
    encoding: str = option(
        "map",
        "encoding of an event: map (vLLM 0.28 and later), or array (before, and SGLang)",
    )
    int_hashes: bool = option(True, "send block hashes as 64-bit integers; else as bytes")


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
