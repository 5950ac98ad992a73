"""Makes both ends of a worker's queries from its configuration.

Tests: tests/unit/runtime/test_worker_queries.py, tests/integration/test_prefix_queries.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvmesh.engine.core import EngineCore
from kvmesh.engine.protocol import ModelRunner
from kvmesh.runtime.app import ServiceContext
from kvmesh.runtime.arriving_kv import ArrivingKv
from kvmesh.runtime.kv_pool import KvPool
from kvmesh.runtime.prefix_queries import PrefixQueries, QueryMode, parse_query_mode
from kvmesh.runtime.query_answers import GivesBlocks, QueryAnswers
from kvmesh.runtime.query_metrics import QueryMetrics
from kvmesh.runtime.worker_channels import send_options
from kvmesh.runtime.worker_config import WorkerConfig
from kvmesh.runtime.worker_parts import WorkerParts
from kvmesh.transfer.asker import Asker
from kvmesh.transfer.attend import ClaimKind
from kvmesh.transfer.pacing import Pacer
from kvmesh.transfer.protocol import ChannelIdentity


def start_queries(
    context: ServiceContext,
    config: WorkerConfig,
    parts: WorkerParts,
    runner: ModelRunner,
    identity: ChannelIdentity,
    metrics: QueryMetrics,
    egress: Pacer | None,
) -> PrefixQueries | None:
    """Makes the sender of queries; None if queries are off, or the model has no partial attention.

    Args:
        egress: see `Asker`.

    Raises:
        ConfigError: an unknown mode, or as `send_options`.
    """
    mode = parse_query_mode(config.fetch.query)
    partial = runner.partial_attention
    if partial is None or mode is QueryMode.NEVER:
        return None
    sending = send_options(config)
    # The whole batch waits for an answer, so the wait is shorter than for a handoff.
    stall_s = min(config.fetch.stall_s, sending.stall_timeout_s)
    asker = Asker(identity, replace(sending, stall_timeout_s=stall_s), parts.clock, egress)

    async def close() -> None:
        await asyncio.to_thread(asker.close)  # it waits until the engine's thread has left a link

    context.stack.push_async_callback(close)
    return PrefixQueries(parts.core, partial, asker, mode, parts.prompt_time, metrics)


def answer_queries(
    runner: ModelRunner,
    core: EngineCore,
    arriving: ArrivingKv,
    pool: KvPool,
    metrics: QueryMetrics,
    max_open: int,
) -> QueryAnswers | None:
    """Makes the side that answers queries; None if the model has no partial attention."""
    partial = runner.partial_attention
    if partial is None:
        return None
    givers: dict[ClaimKind, GivesBlocks] = {
        ClaimKind.RESERVATION: arriving,
        ClaimKind.LEASE: pool,
    }
    return QueryAnswers(runner.spec.layout, core.pool, partial, givers, metrics, max_open)
