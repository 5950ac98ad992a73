"""Makes both ends of a worker's prefix fetch from its configuration.

Tests: tests/unit/runtime/test_worker_pool.py, tests/integration/test_prefix_fetch.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvmesh.core.errors import ConfigError
from kvmesh.rpc.pool_client import PoolClient
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.fetch_result import FetchOptions
from kvmesh.runtime.kv_pool import LeaseLimits
from kvmesh.runtime.pool_metrics import PoolMetrics
from kvmesh.runtime.prefix_fetch import PrefixFetcher
from kvmesh.runtime.worker_channels import send_options
from kvmesh.runtime.worker_config import FetchSection, WorkerConfig
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.transfer.protocol import ChannelIdentity
from kvmesh.transfer.reader import BlockReader
from kvmesh.transfer.staging import StagingRing


def lease_limits(section: FetchSection) -> LeaseLimits:
    """What this worker gives to readers.

    Raises:
        ConfigError: a share that cannot be.
    """
    if section.max_share > 1:
        raise ConfigError(f"fetch.max_share must be 0 to 1, got {section.max_share:g}")
    return LeaseLimits(section.lease_s, section.max_leases, section.max_share)


def start_fetcher(
    context: ServiceContext,
    config: WorkerConfig,
    parts: WorkerParts,
    identity: ChannelIdentity,
    metrics: PoolMetrics,
    on_stored: Callable[[], None],
    staging: StagingRing | None,
) -> PrefixFetcher:
    """A fetcher that ends with the service.

    Args:
        staging: see `PrefixFetcher`; outlives the fetcher.

    Raises:
        ConfigError: as `send_options`.
    """
    options = FetchOptions(config.fetch.timeout_s)
    sending = send_options(config)
    # What does not come is computed, so it is not waited for as long as for a handoff.
    stall_s = min(config.fetch.stall_s, sending.stall_timeout_s)
    reader = BlockReader(identity, replace(sending, stall_timeout_s=stall_s))
    context.stack.push_async_callback(reader.close)
    client = PoolClient(context.access)
    context.stack.push_async_callback(client.close)
    fetcher = PrefixFetcher(parts, reader, client, options, metrics, on_stored, staging)
    context.stack.push_async_callback(fetcher.close)
    return fetcher
