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
    store: str = option("redis", "redis, or memory: one replica, rebuilt by the workers if lost")
    lease_s: float = positive(10.0, "a worker that is silent for longer is not matched any more")
    sweep_interval_s: float = positive(5.0, "pause between removals of what dead workers left")
    sweep_max_blocks: int = positive(20_000, "most entries that one sweep removes")


@dataclass(frozen=True, slots=True)
class LimitConfig:
    lookup_timeout_s: float = positive(0.1, "a lookup that takes longer is answered as degraded")
    max_lookups: int = positive(32, "lookups at one time; one more is answered as degraded")
    probe_interval_s: float = positive(0.25, "pause between attempts to reach a store that is down")


@dataclass(frozen=True, slots=True)
class PoolConfig:
    budget_mb_s: float = option(100.0, "megabytes per second that copies may take; 0: no copies")
    window_s: float = positive(WINDOW_S, "pause between plans; reads count half after each")
    min_reads: float = option(MIN_READS, "a prefix that was read less often of late is not copied")
    segment_blocks: int = positive(
        SEGMENT_BLOCKS, "blocks per segment, for which reads are counted"
    )
    max_segments: int = positive(MAX_SEGMENTS, "segments whose reads are remembered, per model")
    placement: str = option(
        "local", "local, or hashed: hot prefixes are copied to hashed homes too"
    )
    eviction: str = option(
        "local", "local, or global: full workers evict first what others hold and nobody reads"
    )
    between_mb_s: float = option(
        10.0,
        "megabytes per second that copies between clusters may take besides; 0: no such copies",
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
