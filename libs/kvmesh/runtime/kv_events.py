"""Connects a worker's engine to the publisher of KV events, if that is asked for.

Tests: tests/integration/test_kv_events.py.
"""

from __future__ import annotations

from typing import Protocol

from kvmesh.core.errors import ConfigError
from kvmesh.engine.core import EngineCore
from kvmesh.engine.sequence import Sequence
from kvmesh.kv.events import KvEventLog
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.worker_config import WorkerConfig

ENCODINGS = ("array", "map")


class EventSink(Protocol):
    """Whoever publishes events."""

    def notify(self) -> None:
        """Says that there are events."""
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
    log = KvEventLog(core.block_size, lambda block_hash: bool(core.pool.match((block_hash,))))
    wire = WireFormat(
        core.block_size,
        medium="CPU" if config.engine.device == "cpu" else "GPU",
        as_map=section.encoding == "map",
        int_hashes=section.int_hashes,
    )
    publisher = KvEventPublisher(section, wire, log.take)
    context.stack.callback(publisher.close)

    def sealed(sequence: Sequence, first: int) -> None:
        log.stored(sequence.chain.hashes[: sequence.kv.num_sealed], sequence.tokens, first)
        publisher.notify()

    core.on_sealed = core.fills.on_filled = sealed
    core.pool.on_removed = log.removed
    context.spawn(publisher.run(), "kv events")
    return publisher
