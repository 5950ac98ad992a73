"""Connects a worker's engine to the publisher of KV events, if one is configured.

Tests: tests/integration/test_kv_events.py.
"""

from __future__ import annotations

from itertools import groupby
from typing import Protocol

from kvmesh.core.adapters import adapter_name
from kvmesh.core.errors import ConfigError
from kvmesh.core.types import BlockHash
from kvmesh.engine.core import EngineCore
from kvmesh.engine.sequence import Sequence
from kvmesh.kv.block_pool import BlockPool
from kvmesh.kv.events import KvEventLog
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.worker_config import WorkerConfig

ENCODINGS = ("array", "map")

MEDIA = {"host": "CPU", "disk": "DISK"}
"""Names of the tiers for vLLM's subscribers."""


class EventSink(Protocol):
    """Publishes events."""

    def notify(self) -> None:
        """Notes that there are events."""
        ...


def start_kv_events(
    context: ServiceContext, config: WorkerConfig, core: EngineCore
) -> EventSink | None:
    """Starts the publisher; None if it is off.

    Raises:
        ConfigError: an endpoint or the encoding cannot be used, or the extra is not installed.
    """
    section = config.events
    if not section.endpoint:
        return None
    if section.encoding not in ENCODINGS:
        known = ", ".join(ENCODINGS)
        raise ConfigError(f"events.encoding must be one of {known}, got {section.encoding!r}")
    try:
        # Only a worker that publishes needs these packages.
        from kvmesh.runtime.kv_event_publisher import KvEventPublisher  # noqa: PLC0415
        from kvmesh.runtime.kv_event_wire import WireFormat  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"events.endpoint needs the package {error.name}: pip install 'kvmesh[events]'"
        ) from error
    log = log_of_pool(core.pool, "CPU" if config.engine.device == "cpu" else "GPU")
    wire = WireFormat(
        core.block_size,
        as_map=section.encoding == "map",
        int_hashes=section.int_hashes,
    )
    publisher = KvEventPublisher(section, wire, log.take)
    context.stack.callback(publisher.close)

    def sealed(sequence: Sequence, first: int) -> None:
        hashes = sequence.chain.hashes[: sequence.kv.num_sealed]
        log.stored(hashes, sequence.tokens, first, adapter_name(sequence.spec.adapter))
        publisher.notify()

    core.on_sealed = core.fills.on_filled = sealed
    context.spawn(publisher.run(), "kv events")
    return publisher


def log_of_pool(pool: BlockPool, medium: str) -> KvEventLog:
    """Makes the event log of a pool in this medium, and of the tiers below it."""
    log = KvEventLog(pool.block_size, lambda block_hash: bool(pool.match((block_hash,))), medium)
    pool.on_removed = log.removed
    below = pool.below
    if below is None:
        return log

    def lowered(block_hash: BlockHash) -> None:
        tier = below.tier_of(block_hash)
        assert tier is not None, "a block that left for a tier is there"
        log.lowered(block_hash, MEDIA[tier])

    pool.on_lowered = lowered
    # A disk still holds the blocks of an earlier incarnation; longer names exist only in this pool.
    for tier, hashes in groupby(pool.held_hashes(), key=below.tier_of):
        if tier is not None:
            log.found(list(hashes), MEDIA[tier])
    return log
