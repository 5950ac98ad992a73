"""Tiers below a worker's pool, as its config says.

Tests: tests/unit/runtime/test_worker_tiers.py, tests/integration/test_tiers.py.
"""

from __future__ import annotations

import asyncio

from kvmesh.core.clock import Clock
from kvmesh.core.errors import ConfigError
from kvmesh.engine.copier import Copier
from kvmesh.engine.core import EngineCore
from kvmesh.engine.host_arena import HostArena
from kvmesh.engine.prefix_fill import PrefixFill
from kvmesh.engine.protocol import ModelRunner
from kvmesh.engine.tier_stores import HostStore
from kvmesh.engine.tiered_cache import LoadResult, TieredCache
from kvmesh.kv.tiers import Tier
from kvmesh.runtime.worker_config import TiersSection

_GIB = 1 << 30


def make_tiers(
    config: TiersSection, core: EngineCore, runner: ModelRunner, clock: Clock, copier: Copier
) -> TieredCache | None:
    """What keeps evicted blocks; None where they are gone.

    Raises:
        ConfigError: a size is negative, or not even one block fits.
        LostError: the device has no room for what copies pass through.
    """
    if config.host_gib == 0:
        return None
    block_bytes = runner.spec.layout.block_bytes
    num_places = int(config.host_gib * _GIB) // block_bytes
    if num_places <= 0:
        raise ConfigError(
            f"tiers.host_gib {config.host_gib:g} holds no block of {block_bytes} bytes:"
            " give more, or 0"
        )
    store = HostStore(HostArena(runner.kv, block_bytes, num_places), copier)
    tier = Tier("host", num_places)
    return TieredCache(core.pool, core.fills, [tier], [store], block_bytes, clock)


async def load_prefix(tiers: TieredCache, fill: PrefixFill) -> LoadResult:
    """Brings up what lies below of a prefix; a load that is cancelled ends by itself."""
    loaded: asyncio.Future[LoadResult] = asyncio.get_running_loop().create_future()

    def done(result: LoadResult) -> None:
        if not loaded.done():
            loaded.set_result(result)

    tiers.load(fill, done)
    return await loaded
