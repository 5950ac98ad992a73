"""One row per group of workers, for the console.

Pure. Its shape is documented in docs/console.md. Tests: tests/unit/console/test_group_rows.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvmesh.console.rows import Json
from kvmesh.console.sampler import WorkerRates
from kvmesh.console.share import Share
from kvmesh.core.details import FleetWorker
from kvmesh.core.summary_statistics import percentile
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.groups import GroupKey


def group_rows(
    workers: Sequence[FleetWorker], rates: Mapping[WorkerId, WorkerRates], share: Share
) -> list[Json]:
    """The groups, in the order of their keys.

    Args:
        rates: rates of the workers that have any.
        share: the requests; each belongs to the group of the worker that decodes it.
    """
    members: dict[GroupKey, list[FleetWorker]] = {}
    for worker in workers:
        members.setdefault(GroupKey.of(worker.info), []).append(worker)
    where: dict[str, GroupKey] = {
        each.info.worker_id: key for key, its in members.items() for each in its
    }
    num_open = Counter[GroupKey]()
    for flow in share.flows:
        key = where.get(flow["decode"] or flow["prefill"])
        if key is not None:
            num_open[key] += flow["count"]
    ttfts: dict[GroupKey, list[float]] = {}
    for name, ttft_s in share.ttfts:
        if name in where:
            ttfts.setdefault(where[name], []).append(ttft_s)
    return [
        _row(key, its, rates, num_open[key], ttfts.get(key, []))
        for key, its in sorted(members.items())
    ]


def _row(
    key: GroupKey,
    workers: Sequence[FleetWorker],
    rates: Mapping[WorkerId, WorkerRates],
    num_open: int,
    ttfts_s: Sequence[float],
) -> Json:
    found = [rates.get(each.info.worker_id, WorkerRates()) for each in workers]
    roles = Counter(each.info.role for each in workers)
    return {
        "name": key.name,
        "model": key.model,
        "checkpoint": key.checkpoint,
        "scenario": key.scenario,
        "cluster": key.cluster,
        "workers": {role.value: roles[role] for role in Role},
        "ready": sum(not each.load.draining for each in workers),
        "open": num_open,
        "prefill": {
            "active": sum(each.load.prefill_active for each in workers),
            "slots": sum(each.info.prefill_slots for each in workers),
        },
        "decode": {
            "active": sum(each.load.decode_running + each.load.decode_reserved for each in workers),
            "slots": sum(each.info.decode_slots for each in workers),
        },
        "blocks": {
            "total": sum(each.info.num_blocks for each in workers),
            "used": sum(each.info.num_blocks - each.load.blocks_free for each in workers),
        },
        "ttft_p50_ms": _percentile_ms(ttfts_s, 50),
        "ttft_p99_ms": _percentile_ms(ttfts_s, 99),
        "prefill_tokens_s": round(sum(each.prefill_tokens_s for each in found), 1),
        "decode_tokens_s": round(sum(each.decode_tokens_s for each in found), 1),
    }


def _percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return round(percentile(seconds, percent) * 1000, 2) if seconds else None
