"""The sentences that explain a route plan or a refusal.

Tests: tests/unit/policy/test_routing.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmesh.core.types import Refusal, RefusalReason, Role, RouteQuery
from kvmesh.policy.ranking import Standing
from kvmesh.policy.view import WorkerView

RETRY_NO_WORKERS_MS = 250
"""Milliseconds until a retry: about the time in which a restarted worker or scheduler is back."""


def prefill_reason(standing: Standing) -> str:
    """Returns the reason for the prefill worker: its cached tokens and used slots."""
    worker = standing.worker
    return (
        f"prefill on {worker.worker_id} with {standing.cached_tokens} of "
        f"{standing.query.num_tokens} tokens cached and {worker.prefill_used} of "
        f"{worker.info.prefill_slots} slots used"
    )


def decode_reason(standing: Standing) -> str:
    """Returns the reason for the decode worker: its used slots and free blocks."""
    worker = standing.worker
    return (
        f"decode on {worker.worker_id} with {worker.decode_used} of "
        f"{worker.info.decode_slots} slots used and {worker.load.blocks_free} blocks free"
    )


def _census(workers: Iterable[WorkerView]) -> str:
    counts = dict.fromkeys(Role, 0)
    for worker in workers:
        counts[worker.info.role] += 1
    return ", ".join(f"{count} {role.value}" for role, count in counts.items() if count)


def why_aggregated(able: Sequence[WorkerView]) -> str:
    """Returns the reason why the default placement is aggregated."""
    roles = {worker.info.role for worker in able}
    if roles == {Role.HYBRID}:
        return "all workers are hybrid"
    if len(roles) > 1:
        return "no prefill and decode worker share a cluster and a layout"
    return f"no {'decode' if Role.PREFILL in roles else 'prefill'} worker besides {_census(able)}"


def no_pair(query: RouteQuery, able: Sequence[WorkerView]) -> Refusal:
    """Returns the refusal if no prefill and decode pair exists for disaggregated placement."""
    message = (
        f"disaggregated placement of {query.model} needs a prefill and a decode worker of one "
        f"layout; there are {_census(able)}"
    )
    return Refusal(RefusalReason.NO_WORKERS, message, retry_after_ms=RETRY_NO_WORKERS_MS)


def no_workers(
    query: RouteQuery, served: Sequence[WorkerView], everyone: Sequence[WorkerView]
) -> Refusal:
    """Returns the refusal if no worker takes requests for the model.

    Args:
        served: workers of the model, all draining.
        everyone: workers of all models.
    """
    if served:
        found = f"all {len(served)} workers of it are draining, or connecting to their group"
    elif everyone:
        found = f"served are {', '.join(sorted({worker.info.model for worker in everyone}))}"
    elif query.fingerprint:
        found = f"none of checkpoint {query.fingerprint} is left"
    else:
        found = "no worker is registered"
    return Refusal(
        RefusalReason.NO_WORKERS,
        f"no worker takes requests for model {query.model!r}: {found}",
        retry_after_ms=RETRY_NO_WORKERS_MS,
    )
