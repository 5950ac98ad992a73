"""Makes both ends of a worker's prefix fetch from its configuration.

Tests: tests/unit/runtime/test_worker_pool.py, tests/integration/test_prefix_fetch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvmesh.core.errors import ConfigError
from kvmesh.engine.tiered_cache import TieredCache
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.arriving_kv import ArrivingKv
from kvmesh.runtime.fetch_result import FetchOptions
from kvmesh.runtime.kv_pool import KvPool, LeaseLimits
from kvmesh.runtime.pool_metrics import PoolMetrics
from kvmesh.runtime.prefix_fetch import PrefixFetcher
from kvmesh.runtime.stored_prefixes import StoredPrefixes
from kvmesh.runtime.worker_channels import send_options
from kvmesh.runtime.worker_config import FetchSection, WorkerConfig
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.reader import BlockReader
from kvmesh.transfer.staging import StagingRing


def lease_limits(section: FetchSection) -> LeaseLimits:
    """Makes the limits of this worker's leases.

    Raises:
        ConfigError: a fraction above 1.
    """
    if section.max_share > 1:
        raise ConfigError(f"fetch.max_share must be 0 to 1, got {section.max_share:g}")
    return LeaseLimits(section.lease_s, section.max_leases, section.max_share)


def make_pool(
    section: FetchSection,
    parts: WorkerParts,
    arriving: ArrivingKv,
    tiers: TieredCache | None,
    on_stored: Callable[[], None],
) -> KvPool:
    """Makes the service that lends this worker's KV to others and stores theirs.

    Args:
        arriving: receives KV that others write.
        on_stored: called when blocks came into the prefix cache.

    Raises:
        ConfigError: as `lease_limits`.
    """
    limits = lease_limits(section)
    max_blocks = int(limits.max_share * parts.core.pool.num_blocks)
    stores = StoredPrefixes(parts.core, arriving, section.max_stores, max_blocks, on_stored)
    return KvPool(parts, limits, stores, tiers)


def start_fetcher(
    context: ServiceContext,
    config: WorkerConfig,
    parts: WorkerParts,
    identity: ChannelIdentity,
    metrics: PoolMetrics,
    on_stored: Callable[[], None],
    staging: StagingRing | None,
) -> PrefixFetcher:
    """Makes a fetcher that ends with the service.

    Args:
        staging: see `PrefixFetcher`; outlives the fetcher.

    Raises:
        ConfigError: as `send_options`.
    """
    options = FetchOptions(config.fetch.timeout_s)
    sending = send_options(config)
    # Blocks that do not arrive can be computed, so the wait is shorter than for a handoff.
    stall_s = min(config.fetch.stall_s, sending.stall_timeout_s)
    reader = BlockReader(identity, replace(sending, stall_timeout_s=stall_s))
    context.stack.push_async_callback(reader.close)
    client = PoolClient(context.access)
    context.stack.push_async_callback(client.close)
    fetcher = PrefixFetcher(parts, reader, client, options, metrics, on_stored, staging)
    context.stack.push_async_callback(fetcher.close)
    return fetcher
