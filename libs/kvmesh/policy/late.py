"""Refuses a prompt that would miss its TTFT limit while the workers have others to compute. Pure.

A late first token counts for nothing where limits are objectives, and its prompt delays those that
could be in time. While no other prompt is computed, it delays nobody and is served late.
Source: Mooncake's early rejection (arXiv:2407.00079, 7.2), by the prediction of one route. Tests:
tests/unit/policy/test_late.py.
"""

from __future__ import annotations

from kvmesh.core.types import Refusal, RefusalReason, Role, RouteCause, RoutePlan, RouteQuery
from kvmesh.policy.view import FleetView, WorkerView

LEAST_RETRY_MS = 100
"""Minimum `Retry-After` of such a refusal, in milliseconds."""


def late_refusal(route: RoutePlan, view: FleetView, query: RouteQuery) -> Refusal | None:
    """Returns the refusal of a prompt that would be late on the best worker of its plan.

    Nothing is refused where the time cannot be predicted: without a limit or a measured speed, for
    a prompt that is much longer than the measured ones, a chain or a remote worker. The speed is
    measured in steps with prompts, so on hybrids it includes what they decode in these.

    Args:
        view: the workers that the plan was chosen from.
    """
    budget_s = query.ttft_budget_ms / 1000
    if not budget_s or route.remote or route.cause is RouteCause.CHAIN:
        return None
    best = next(
        (each for each in view.workers if each.worker_id == route.prefill[0].worker_id), None
    )
    if best is None:
        return None
    if query.num_tokens - route.prefill[0].cached_tokens > view.pace.reach_tokens:
        return None
    expected_s = first_token_s(route, best, query, view.pace.token_s)
    if expected_s <= budget_s or not _others_compute(view, query):
        return None
    message = (
        f"its first token is expected in {1000 * expected_s:.0f} ms, {query.ttft_budget_ms} ms of "
        "its limit are left, and other prompts are being computed"
    )
    retry_ms = max(round(1000 * (expected_s - budget_s)), LEAST_RETRY_MS)
    return Refusal(RefusalReason.DEADLINE, message, retry_after_ms=retry_ms)


def first_token_s(route: RoutePlan, worker: WorkerView, query: RouteQuery, token_s: float) -> float:
    """Returns the predicted seconds until the first token on a plan's first prefill worker.

    Args:
        worker: that worker.
        token_s: measured seconds to compute a prompt token; 0 if not known.
    """
    first = route.prefill[0]
    ahead = worker.pending_tokens + worker.prefill_in_flight * query.num_tokens
    own = query.num_tokens - first.cached_tokens - first.saved_tokens
    return (ahead + own) * token_s


def _others_compute(view: FleetView, query: RouteQuery) -> bool:
    return any(
        each.pending_tokens or each.prefill_in_flight
        for each in view.workers
        if each.info.model == query.model and each.info.role is not Role.DECODE
    )
