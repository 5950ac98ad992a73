"""The mesh as one JSON value, from which the console's page draws.

Pure. Its shape is documented in docs/console.md. Tests: tests/unit/console/test_snapshot.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.console.group_rows import group_rows
from kvmesh.console.rows import Json
from kvmesh.console.sampler import Gone, LinkName, Sample, Sampler, WorkerRates
from kvmesh.console.share import Share
from kvmesh.core.details import FleetWorker
from kvmesh.core.types import Role
from kvmesh.policy.groups import GroupKey


@dataclass(frozen=True, slots=True)
class ConsoleView:
    """The data for a snapshot.

    Attributes:
        unix_s: seconds since 1970.
        fresh: whether a scheduler is connected; otherwise the workers are the last known ones.
        kvmanager_connected: whether that scheduler reaches its kvmanager; None if it has none.
        share: the requests of all processes of this gateway.
    """

    unix_s: float
    model: str
    version: str
    fresh: bool
    workers: Sequence[FleetWorker]
    share: Share
    sampler: Sampler
    kvmanager_connected: bool | None = None


def snapshot(view: ConsoleView) -> Json:
    """The whole snapshot except the history."""
    share = view.share
    return {
        "now": round(view.unix_s, 3),
        "model": view.model,
        "version": view.version,
        "fresh": view.fresh,
        "kvmanager": view.kvmanager_connected,
        "workers": [
            worker_row(each, view.sampler.worker_rates.get(each.info.worker_id, WorkerRates()))
            for each in sorted(view.workers, key=lambda each: each.info.worker_id)
        ],
        "groups": group_rows(view.workers, view.sampler.worker_rates, share),
        "gone": [gone_row(each, view.unix_s) for each in view.sampler.gone.values()],
        "links": [row for each in view.workers for row in _link_rows(each, view.sampler)],
        "flows": list(share.flows),
        "open": share.num_open,
        "arrived_total": share.arrived_total,
        "ended_total": share.ended_total,
        "refusals": [
            {"stage": stage, "reason": reason, "count": int(count)}
            for (stage, reason), count in sorted(share.refusals.items(), key=lambda item: -item[1])
        ],
        "requests": list(share.requests),
        "sample": sample_row(view.sampler.samples[-1]) if view.sampler.samples else None,
    }


def history(samples: Iterable[Sample]) -> list[Json]:
    """The samples, oldest first."""
    return [sample_row(each) for each in samples]


def sample_row(sample: Sample) -> Json:
    """One sample, rounded for display."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(sample).items()
    }


def worker_row(worker: FleetWorker, rates: WorkerRates) -> Json:
    """One worker."""
    info, load, detail = worker.info, worker.load, worker.detail
    group = GroupKey.of(info)
    state = "draining" if load.draining else "ready"
    if info.role is Role.SPARE:
        state = "spare"
    elif worker.connecting:
        state = "connecting"
    cached = min(detail.blocks_cached, load.blocks_free)
    return {
        "id": info.worker_id,
        "role": info.role.value,
        "cluster": info.cluster,
        "group": f"{group.name} {group.model} {group.checkpoint}",
        "state": "cordoned" if detail.cordoned else state,
        "fault": worker.fault,
        "missing_native": list(info.missing_native),
        "incarnation": info.incarnation,
        "address": str(info.control_endpoint),
        "prefill": {"active": load.prefill_active, "slots": info.prefill_slots},
        "decode": {
            "running": load.decode_running,
            "reserved": load.decode_reserved,
            "preempted": load.decode_preempted,
            "slots": info.decode_slots,
        },
        "blocks": {
            "total": info.num_blocks,
            "used": info.num_blocks - load.blocks_free,
            "cached": cached,
            "bytes": info.layout.block_bytes,
        },
        "hit_share": rates.hit_share,
        "prefill_tokens_s": round(rates.prefill_tokens_s, 1),
        "decode_tokens_s": round(rates.decode_tokens_s, 1),
    }


def gone_row(gone: Gone, unix_s: float) -> Json:
    """One worker that left."""
    info = gone.worker.info
    return {
        "id": info.worker_id,
        "role": info.role.value,
        "cluster": info.cluster,
        "for_s": round(max(unix_s - gone.at_s, 0.0), 1),
    }


def _link_rows(worker: FleetWorker, sampler: Sampler) -> list[Json]:
    return [
        {
            "from": link.peer if link.is_incoming else worker.info.worker_id,
            "to": worker.info.worker_id if link.is_incoming else link.peer,
            "channel": link.channel,
            "bytes_total": link.bytes_total,
            "bytes_s": round(
                sampler.link_rates.get(
                    LinkName(worker.info.worker_id, link.peer, link.channel), 0.0
                )
            ),
            "goodput_bytes_s": round(link.bytes_total / link.busy_s) if link.busy_s > 0 else None,
            "budget_bytes_s": link.budget_bytes_s or None,
            "queued_bytes": link.queued_bytes,
            "rtt_ms": round(link.rtt_s * 1000, 3) if link.rtt_s > 0 else None,
            "retransmits": link.retransmits,
            "failed_total": link.failed_total,
        }
        for link in worker.detail.links
    ]
