"""Metrics of the kvmanager. One set per process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from kvmesh.telemetry.batch_histogram import BatchHistogram

MATCH_SECONDS = BatchHistogram(
    "kvmesh_kvmanager_match_seconds",
    "Time to answer one prefix lookup",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0),
)
MATCHES = Counter(
    "kvmesh_kvmanager_matches", "Prefix lookups by outcome: hit, miss, degraded", ["outcome"]
)
EVENTS_APPLIED = Counter(
    "kvmesh_kvmanager_events_applied",
    "Batches of block events: applied, gap, unknown, failed, ignored (a snapshot is awaited)",
    ["status"],
)
RESYNCS = Counter("kvmesh_kvmanager_resyncs", "Snapshots ordered from workers", ["reason"])
REDIS_UP = Gauge("kvmesh_kvmanager_redis_up", "1 while the store answers")
STREAMS = Gauge("kvmesh_kvmanager_streams", "Workers connected to this replica")
WATCHERS = Gauge("kvmesh_kvmanager_watchers", "Schedulers that follow the store over this replica")
PUBLISHERS = Gauge("kvmesh_kvmanager_publishers", "Workers with a lease, over all replicas")
BLOCKS = Gauge("kvmesh_kvmanager_blocks", "Blocks known; one held by two workers counts twice")
SWEPT = Counter("kvmesh_kvmanager_swept_blocks", "Entries of dead workers that were removed")
POOL_ORDERS = Counter(
    "kvmesh_kvmanager_pool_orders",
    "Orders to workers planned by this replica: copy, evict_first",
    ["order"],
)
POOL_GIVEN_UP = Counter(
    "kvmesh_kvmanager_pool_given_up_blocks",
    "Copies that workers were told to evict first, since others hold them: pool, host, disk",
    ["tier"],
)
POOL_COPIES = Counter(
    "kvmesh_kvmanager_pool_copies",
    "Copy orders that workers of this replica answered: done, refused, failed",
    ["outcome", "reason"],
)
POOL_COPIED_BYTES = Counter("kvmesh_kvmanager_pool_copied_bytes", "Bytes that copies took")
POOL_HOT_RUNS = Gauge(
    "kvmesh_kvmanager_pool_hot_prefixes", "Prefixes read often of late; 0 on who does not plan"
)
POOL_READS_CV = Gauge(
    "kvmesh_kvmanager_pool_reads_cv",
    "Coefficient of variation of cached blocks read per worker of late",
    ["cluster", "role"],
)
POOL_PLANNING = Gauge("kvmesh_kvmanager_pool_planning", "1 on the replica that plans copies")
HEAT_NOTES_DROPPED = Counter(
    "kvmesh_kvmanager_heat_notes_dropped", "Lookups that came too fast for their reads to count"
)
