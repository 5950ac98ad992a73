"""Route plans over two clusters: the threshold chooses where to prefill, the route policy chooses
the workers there and at home.

Source: PrfaaS 3.3, 3.4.3. Tests: tests/unit/policy/test_offload_route.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.types import Placement, Refusal, Role, RoutePlan, RouteQuery, WorkerId
from kvmesh.policy.joint_choice import JointChoice
from kvmesh.policy.offload import OffloadChoice, Reach, choose_cluster
from kvmesh.policy.pdserve import GroupChoice
from kvmesh.policy.ranking import RoutePolicy
from kvmesh.policy.routing import plan_route
from kvmesh.policy.view import FleetView, WorkerView


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """A route and the choices behind it; a choice that was not made is None.

    Attributes:
        choice: of the cluster that prefills.
        group: of the P/D group.
        joint: among requests that were decided together with this one.
    """

    route: RoutePlan | Refusal
    choice: OffloadChoice | None
    group: GroupChoice | None = None
    joint: JointChoice | None = None


def plan_offload(
    view: FleetView,
    query: RouteQuery,
    matches: Mapping[WorkerId, int] | None,
    now: float,
    rng: random.Random,
    policy: RoutePolicy,
    *,
    remote: str,
    threshold_tokens: float,
) -> OffloadPlan:
    """Decides the cluster, then the workers.

    Args:
        matches: as for `plan_route`.
        remote: name of the offload cluster; its workers prefill only.
        threshold_tokens: longer uncached prompts go there.
    """
    far = [w for w in view.workers if w.info.cluster == remote and _may_prefill(w)]
    near = [w for w in view.workers if w.info.cluster != remote] if far else []
    if not near:
        return OffloadPlan(plan_route(view, query, matches, now, rng, policy), None)
    near_prefill = [w for w in near if _may_prefill(w)]
    reach = _reach(far, near_prefill, query)
    if not (reach.remote or reach.local):
        return OffloadPlan(plan_route(view, query, matches, now, rng, policy), None)
    choice = choose_cluster(
        query.num_tokens,
        _longest_match(far, query, matches),
        # The KV of a conversation lies on the decode worker that generated the last answer.
        _longest_match(near, query, matches),
        threshold_tokens,
        reach,
    )
    if not choice.remote:
        home = dataclasses.replace(view, workers=tuple(near))
        return OffloadPlan(plan_route(home, query, matches, now, rng, policy), choice)
    decode = [w for w in near if w.info.role is not Role.PREFILL]
    apart = dataclasses.replace(query, placement=Placement.DISAGGREGATED)
    restricted = dataclasses.replace(view, workers=(*far, *decode))
    return OffloadPlan(plan_route(restricted, apart, matches, now, rng, policy), choice)


def _reach(far: list[WorkerView], near: list[WorkerView], query: RouteQuery) -> Reach:
    """What a prompt may use. Where its work was lost in the far cluster and the worker is still
    there, the link may be what failed, which all workers there share: it stays at home. So does
    one that all workers there have just refused because what they computed has not left yet, while
    a worker at home idles: over a link so narrow it would only wait. Where they compute, to wait
    for faster instances may pay, and the threshold is there to decide.
    """
    local = any(map(_is_awake, near))
    was_lost = local and any(worker.worker_id in query.lost for worker in far)
    takers = [worker for worker in far if _is_awake(worker)]
    if all(worker.worker_id in query.avoid and _sends(worker) for worker in takers):
        takers = [] if any(_idles(worker, query) for worker in near) else takers
    return Reach(remote=not was_lost and bool(takers), local=local)


def _sends(worker: WorkerView) -> bool:
    """Whether all its slots are held by KV that has yet to leave."""
    return worker.load.prefill_sending >= worker.info.prefill_slots


def _idles(worker: WorkerView, query: RouteQuery) -> bool:
    """Whether it would compute the prompt at once, as far as is known."""
    return (
        _is_awake(worker)
        and worker.worker_id not in query.avoid
        and worker.prefill_used < worker.info.prefill_slots
    )


def _may_prefill(worker: WorkerView) -> bool:
    return worker.info.role is not Role.DECODE


def _is_awake(worker: WorkerView) -> bool:
    return not worker.load.draining


def _longest_match(
    workers: list[WorkerView], query: RouteQuery, matches: Mapping[WorkerId, int] | None
) -> int:
    """Leading tokens cached by the best holder of a cluster."""
    if not matches:
        return 0
    held = (matches.get(worker.worker_id, 0) * worker.info.layout.block_size for worker in workers)
    return min(max(held, default=0), query.num_tokens)
