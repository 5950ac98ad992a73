"""Details of a worker for people. Tests: tests/e2e/test_fleet_command.py."""

from __future__ import annotations

from collections.abc import Mapping

from kvmesh.core.details import TCP, LinkDetail, WorkerDetail
from kvmesh.engine.core import EngineCore
from kvmesh.transfer.meters import LinkKey, LinkMeter


def worker_detail(
    core: EngineCore,
    meters: Mapping[LinkKey, LinkMeter],
    *,
    cordoned: bool,
    budget_bytes_s: float,
) -> WorkerDetail:
    """Gathers the details of a worker.

    Args:
        meters: meters of its sending links and of its fetches.
        budget_bytes_s: limit of each TCP link; 0 is none.
    """
    engine, (prefill, decode) = core.statistics(), core.queues()
    links = [
        LinkDetail(
            peer=key.peer,
            channel=key.channel,
            bytes_total=meter.bytes,
            queued_bytes=meter.queued_bytes,
            busy_s=meter.busy_s,
            budget_bytes_s=budget_bytes_s if key.channel == TCP else 0.0,
            rtt_s=meter.rtt_s,
            retransmits=meter.retransmits,
            failed_total=meter.refused + meter.lost,
            pair_s=meter.pair_s,
        )
        for key, meter in meters.items()
    ]
    return WorkerDetail(
        cordoned=cordoned,
        blocks_cached=core.pool.statistics().num_evictable,
        prompt_tokens_total=engine.prompt_tokens_total,
        cached_tokens_total=engine.cached_tokens_total,
        prefill_queues=prefill,
        decode_queues=decode,
        links=tuple(links),
    )
