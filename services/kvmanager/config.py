"""Configuration of the kvmanager."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.core.config import option, positive
from kvmesh.metadata.redis_client import RedisConfig
from kvmesh.policy.heat import MAX_SEGMENTS, SEGMENT_BLOCKS, WINDOW_S
from kvmesh.policy.hot_runs import MIN_READS
from kvmesh.runtime.app import ServerConfig
from kvmesh.telemetry.config import TelemetryConfig


@dataclass(frozen=True, slots=True)
class IndexConfig:
    store: str = option(
        "redis", "redis, or memory (for a single replica; workers rebuild it after a loss)"
    )
    lease_s: float = positive(
        10.0, "seconds without a message after which a worker's blocks are no longer matched"
    )
    sweep_interval_s: float = positive(5.0, "seconds between removals of dead workers' entries")
    sweep_max_blocks: int = positive(20_000, "maximum entries removed per sweep")


@dataclass(frozen=True, slots=True)
class LimitConfig:
    lookup_timeout_s: float = positive(
        0.1, "timeout of a lookup in seconds; the answer is then marked as degraded"
    )
    max_lookups: int = positive(
        32, "maximum concurrent lookups; further ones are answered as degraded"
    )
    probe_interval_s: float = positive(
        0.25, "seconds between attempts to reach a store that is down"
    )


@dataclass(frozen=True, slots=True)
class PoolConfig:
    budget_mb_s: float = option(
        100.0, "bandwidth budget of prefix copies, in megabytes per second; 0: no copies"
    )
    window_s: float = positive(
        WINDOW_S, "seconds between copy plans; read counts are halved after each"
    )
    min_reads: float = option(
        MIN_READS,
        "minimum recent reads of a prefix that is copied; the count decays by half per window",
    )
    segment_blocks: int = positive(
        SEGMENT_BLOCKS, "blocks per segment, the unit in which reads are counted"
    )
    max_segments: int = positive(MAX_SEGMENTS, "maximum segments per model whose reads are counted")
    placement: str = option(
        "local",
        "local, or hashed (hot prefixes are also copied to the workers that their hashes name)",
    )
    eviction: str = option(
        "local",
        "local, or global (full workers first evict unread prefixes that other workers also hold)",
    )
    between_mb_s: float = option(
        10.0,
        "separate bandwidth budget of copies between clusters, in megabytes per second; 0: none",
    )


@dataclass(frozen=True, slots=True)
class KvManagerConfig:
    """The kvmanager, which knows the worker that holds each cached block."""

    server: ServerConfig = option(ServerConfig, "")
    telemetry: TelemetryConfig = option(TelemetryConfig, "")
    redis: RedisConfig = option(RedisConfig, "")
    index: IndexConfig = option(IndexConfig, "")
    limits: LimitConfig = option(LimitConfig, "")
    pool: PoolConfig = option(PoolConfig, "")
