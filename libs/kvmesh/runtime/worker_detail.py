"""What a worker shows to people. Tests: tests/e2e/test_fleet_command.py."""

from __future__ import annotations

from kvmesh.core.types import LinkDetail, WorkerDetail
from kvmesh.engine.core import EngineCore
from kvmesh.transfer.meters import TransferStatistics

TCP = "tcp"
"""The kind of channel that a budget is for."""


def worker_detail(
    core: EngineCore, sent: TransferStatistics, *, cordoned: bool, budget_bytes_s: float
) -> WorkerDetail:
    """What people want to see of a worker now.

    Args:
        sent: the sending side of its data plane.
        budget_bytes_s: bound on each TCP link; 0 is none.
    """
    engine = core.statistics()
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
        )
        for key, meter in sent.links.items()
    ]
    return WorkerDetail(
        cordoned=cordoned,
        blocks_cached=core.pool.statistics().num_evictable,
        prompt_tokens_total=engine.prompt_tokens_total,
        cached_tokens_total=engine.cached_tokens_total,
        links=tuple(links),
    )
