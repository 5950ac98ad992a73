"""Route plans over two clusters: the threshold chooses the cluster that prefills, the route policy
chooses the workers there and at home.

A prefix that the other cluster holds is fetched from there if the link between them has room.
Source: PrfaaS 3.3, 3.4.3 point 3. Tests: tests/unit/policy/test_offload_route.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.types import Placement, Refusal, Role, RoutePlan, RouteQuery, WorkerId
from kvmesh.policy.joint_choice import JointChoice
from kvmesh.policy.offload import OffloadChoice, OffloadState, Reach, choose_cluster
from kvmesh.policy.pdserve import GroupChoice
from kvmesh.policy.prefix_source import MIN_FETCH_TOKENS, FetchPace, saved_tokens
from kvmesh.policy.ranking import RoutePolicy
from kvmesh.policy.routing import plan_route
from kvmesh.policy.view import FleetView, WorkerView


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """A route and the choices behind it; a choice that was not made is None.

    Attributes:
        choice: the cluster that prefills.
        group: the P/D group.
        joint: the result of a decision about several requests together.
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
    offload: OffloadState,
) -> OffloadPlan:
    """Decides the cluster (PrfaaS 3.4.3 point 3), then the workers.

    Args:
        matches: as for `plan_route`.
    """
    remote = offload.remote
    far = [w for w in view.workers if w.info.cluster == remote and _may_prefill(w)]
    near = [w for w in view.workers if w.info.cluster != remote] if far else []
    if not near:
        return OffloadPlan(plan_route(view, query, matches, now, rng, policy), None)
    near_prefill = [w for w in near if _may_prefill(w)]
    reach = _reach(far, near_prefill, query)
    if not (reach.remote or reach.local):
        return OffloadPlan(plan_route(view, query, matches, now, rng, policy), None)
    held_far = _longest_match(far, query, matches)
    # A conversation's KV lies on the decode worker that generated the last answer.
    held_near = _longest_match(near, query, matches)
    moves = policy.fetches and _moves(view.pace, held_far, held_near, offload)
    reach = dataclasses.replace(reach, bandwidth_abundant=moves)
    choice = choose_cluster(
        query.num_tokens, held_far.tokens, held_near.tokens, offload.threshold_tokens, reach
    )
    if not choice.remote:
        home = dataclasses.replace(view, workers=tuple(near))
        lenders = far if choice.moved_tokens else []
        return OffloadPlan(plan_route(home, query, matches, now, rng, policy, lenders), choice)
    decode = [w for w in near if w.info.role is not Role.PREFILL]
    apart = dataclasses.replace(query, placement=Placement.DISAGGREGATED)
    restricted = dataclasses.replace(view, workers=(*far, *decode))
    # Decode and hybrid workers at home are in the plan already; only prefill workers are lenders.
    lenders = [w for w in near if w.info.role is Role.PREFILL] if choice.moved_tokens else []
    return OffloadPlan(plan_route(restricted, apart, matches, now, rng, policy, lenders), choice)


@dataclass(frozen=True, slots=True)
class _Held:
    """The longest part of a prompt that a worker of one side holds, and that worker's cluster."""

    tokens: int
    cluster: str


def _moves(pace: FetchPace, far: _Held, near: _Held, offload: OffloadState) -> bool:
    """Whether the side that holds less fetches the rest sooner than it computes it.

    Each direction of the link counts by its own speed. The prompts' KV leaves the far cluster, so
    only a prefix that leaves it too needs room beside them.
    """
    num_tokens = abs(far.tokens - near.tokens)
    leaves_far = far.tokens > near.tokens
    if num_tokens < MIN_FETCH_TOKENS or (leaves_far and not offload.link_has_room):
        return False
    source, target = (far, near) if leaves_far else (near, far)
    share = pace.share(source.cluster, target.cluster)
    return saved_tokens(num_tokens, 0.0, pace.overhead_tokens, share) > 0


def _reach(far: list[WorkerView], near: list[WorkerView], query: RouteQuery) -> Reach:
    """Returns the clusters that a prompt may use.

    A prompt stays at home in two cases. If a worker of the far cluster lost it and is still listed,
    the link may have failed, which all workers there share. And if all workers there refused it
    because computed KV still fills their slots, while a worker at home is idle: over so narrow a
    link it would only wait. If they refused because they compute, waiting for faster instances may
    pay, and the threshold decides.
    """
    local = any(map(_is_awake, near))
    was_lost = local and any(worker.worker_id in query.lost for worker in far)
    takers = [worker for worker in far if _is_awake(worker)]
    if all(worker.worker_id in query.avoid and _sends(worker) for worker in takers):
        takers = [] if any(_idles(worker, query) for worker in near) else takers
    return Reach(remote=not was_lost and bool(takers), local=local)


def _sends(worker: WorkerView) -> bool:
    """Whether all its prefill slots are held by computed KV that has not been sent yet."""
    return worker.load.prefill_sending >= worker.info.prefill_slots


def _idles(worker: WorkerView, query: RouteQuery) -> bool:
    """Whether the worker would compute the prompt at once, by its last report."""
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
) -> _Held:
    """Returns what the best holder of a side has; without a holder, nothing of the first worker."""
    best = _Held(0, workers[0].info.cluster)
    for worker in workers if matches else ():
        tokens = (matches or {}).get(worker.worker_id, 0) * worker.info.layout.block_size
        if tokens > best.tokens:
            best = _Held(tokens, worker.info.cluster)
    return dataclasses.replace(best, tokens=min(best.tokens, query.num_tokens))
