"""Tiers below a worker's pool, from its config.

Tests: tests/unit/runtime/test_worker_tiers.py, tests/integration/test_tiers.py and
tests/integration/test_outside_store.py.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from kvmesh.core.block_names import DISK, HOST
from kvmesh.core.clock import Clock
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import WorkerId
from kvmesh.engine.block_file import BlockFile
from kvmesh.engine.copier import Copier, ThreadCopier
from kvmesh.engine.core import EngineCore
from kvmesh.engine.disk_store import DiskStore, passage_places
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.outside_cache import OutsideCache, OutsideStore
from kvmesh.engine.prefix_fill import PrefixFill
from kvmesh.engine.protocol import ModelRunner, ModelSpec
from kvmesh.engine.tier_stores import HostStore, TierStore
from kvmesh.engine.tiered_cache import LoadResult, TieredCache
from kvmesh.kv.tiers import Tier
from kvmesh.policy.prompt_time import PromptTime
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.worker_config import OutsideSection, TiersSection
from kvmesh.telemetry.logs import event_logger

log = event_logger(__name__)

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class TierParts:
    """The parts of a worker that tiers use.

    Attributes:
        copier: copies between the pool and host memory.
        disk: reads and writes the file.
    """

    worker_id: WorkerId
    core: EngineCore
    runner: ModelRunner
    prompt_time: PromptTime
    clock: Clock
    copier: Copier
    disk: Copier


def make_tiers(
    config: TiersSection, parts: TierParts, outside: OutsideStore | None = None
) -> TieredCache | None:
    """Makes the cache of evicted blocks; None if no tier is configured.

    Args:
        outside: store below the tiers.

    Raises:
        ConfigError: a size is negative or smaller than one block, or the disk cannot be used.
        LostError: the device has no room for the copies' buffers.
    """
    core, spec = parts.core, parts.runner.spec
    block_bytes = spec.layout.block_bytes
    num_host = _num_places("host_gib", config.host_gib, block_bytes)
    if outside is not None and not num_host:
        raise ConfigError(
            "outside.url needs tiers.host_gib: blocks pass through that memory; give some"
        )
    num_disk = _num_places("disk_gib", config.disk_gib, block_bytes)
    if not num_host and not num_disk:
        return None
    num_passage = passage_places(block_bytes) if num_disk else 0
    arena = HostArena(parts.runner.kv, block_bytes, num_host + num_passage)
    tiers: list[Tier] = []
    stores: list[TierStore] = []
    if num_host:
        tiers.append(Tier(HOST, num_host))
        stores.append(HostStore(arena, parts.copier))
    disk: DiskStore | None = None
    if num_disk:
        if not config.disk_path:
            raise ConfigError("tiers.disk_path is empty: name a folder on a local disk")
        name = urllib.parse.quote(parts.worker_id, safe="")
        path = Path(config.disk_path).expanduser() / f"{name}.kv"
        file = BlockFile(path, f"{spec.layout} {spec.groups}", block_bytes, num_disk)
        passage = range(num_host, num_host + num_passage)
        disk = DiskStore(file, arena, passage, parts.copier, parts.disk)
        tiers.append(Tier(DISK, num_disk))
        tiers[-1].adopt(kept := file.kept())
        log.info("tier_on_disk", path=str(path), num_blocks=len(kept), num_places=num_disk)
        stores.append(disk)
    spill = disk if num_host else None
    cache = TieredCache(core.pool, core.fills, tiers, stores, parts.prompt_time, parts.clock, spill)
    if outside is not None:
        cache.outside = OutsideCache(
            outside,
            core.pool,
            core.fills.rooms,
            cache.below,
            arena.views,
            block_bytes,
            cache.compute_s,
            parts.clock,
        )
    return cache


def make_outside(config: OutsideSection, spec: ModelSpec) -> OutsideStore | None:
    """Makes the store below the tiers; None if none is configured.

    Raises:
        ConfigError: the URL or the password cannot be used, or the extra is not installed.
    """
    if not config.url:
        return None
    try:
        # Only a worker with such a store needs these packages.
        from kvmesh.metadata.redis_blocks import RedisBlocks  # noqa: PLC0415
        from kvmesh.metadata.redis_client import RedisClient, RedisConfig  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"outside.url needs the package {error.name}: pip install 'kvmesh[outside]'"
        ) from error
    client = RedisClient(
        RedisConfig(
            url=config.url,
            password=config.password,
            key_prefix=config.key_prefix,
            timeout_s=config.timeout_s,
            password_file=config.password_file,
        )
    )
    identity = f"{spec.layout} {spec.groups}"
    return RedisBlocks(client, identity, spec.layout.block_bytes, config.ttl_s)


def start_tiers(context: ServiceContext, tiers: TieredCache, disk: ThreadCopier) -> None:
    """Runs the background tasks of the tiers until the worker ends."""
    context.spawn(disk.run(), "disk")
    context.stack.callback(tiers.close)
    if tiers.outside is not None:
        context.stack.push_async_callback(tiers.outside.close)
        context.spawn(tiers.outside.run(), "outside store")


def _num_places(name: str, gib: float, block_bytes: int) -> int:
    num_places = int(gib * _GIB) // block_bytes
    if gib and num_places <= 0:
        raise ConfigError(
            f"tiers.{name} {gib:g} holds no block of {block_bytes} bytes: give more, or 0"
        )
    return num_places


async def load_prefix(tiers: TieredCache, fill: PrefixFill) -> LoadResult:
    """Brings up a prefix's blocks from the tiers. A load continues if the caller is cancelled."""
    loaded: asyncio.Future[LoadResult] = asyncio.get_running_loop().create_future()

    def done(result: LoadResult) -> None:
        if not loaded.done():
            loaded.set_result(result)

    tiers.load(fill, done)
    return await loaded
