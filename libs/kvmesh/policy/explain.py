"""Records the inputs of a route decision as values that people and programs can read afterwards.

Tests: tests/unit/policy/test_explain.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import (
    Candidate,
    Placement,
    Refusal,
    RequestId,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.elastic import ElasticReason
from kvmesh.policy.joint_choice import JointReason
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.policy.pdserve import GroupReason
from kvmesh.policy.ranking import RankFunction, RoutePolicy, Standing
from kvmesh.policy.view import FleetView, WorkerView

MAX_EXPLAINED = 4
"""Maximum number of described candidates per side; later ones are hardly ever asked."""


@dataclass(frozen=True, slots=True)
class CandidateFacts:
    """A candidate and the numbers that determine its rank.

    Attributes:
        score: the policy's rank; smaller is better, and the first entry that differs decides.
        pending_tokens: prompt tokens that it has accepted and not computed.
        fetch: why it fetches a prefix, or does not: a `FetchReason`.
        source: the worker that it fetches from; empty if it fetches nothing.
        saved_tokens: part of `score` that the fetch saves.
        host_tokens, disk_tokens: those of `cached_tokens` that lie in host memory and on disk.
        load_tokens: part of `score` that bringing these up costs.
    """

    worker_id: WorkerId
    cached_tokens: int
    score: tuple[float, ...]
    prefill_used: int
    prefill_slots: int
    decode_used: int
    decode_slots: int
    blocks_free: int
    pending_tokens: int
    fetch: str = FetchReason.NOBODY.value
    source: str = ""
    saved_tokens: float = 0.0
    host_tokens: int = 0
    disk_tokens: int = 0
    load_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    """One route decision.

    Attributes:
        reason: a plan's `RouteCause` or a refusal's `RefusalReason`: a closed set.
        detail: the sentence that explains it.
        prefill, decode: the first candidates in order; `decode` is empty when aggregated.
        threshold_tokens: threshold of the choice of cluster; None without a remote cluster.
        compared_tokens: uncached tokens that were compared with it; 0 where there was no choice.
        num_seen: number of known workers.
        scenario: scenario of the request.
        group, group_reason: P/D group that serves it, and why that one; empty and None where
            workers have no scenario.
        joint_reason: effect of the joint decision on the request; None where requests are decided
            one by one.
        num_asked: number of requests decided together, this one included.
        turn: number of their prompts that the same worker computes before this one.
        brought_tokens: tokens of this prompt that are fetched from another worker's cache.
        num_batched, degree, elastic_reason: prompts and workers of its batch, and the kind of the
            plan, where a program forms batches; 0, 1 and None elsewhere.
        lookup: outcome of the prefix lookup: a value of the scheduler's `Lookup`.
    """

    request_id: RequestId
    policy: str
    placement: Placement | None
    reason: str
    detail: str
    num_tokens: int
    prefill: tuple[CandidateFacts, ...]
    decode: tuple[CandidateFacts, ...]
    threshold_tokens: float | None
    compared_tokens: int
    cache_known: bool
    num_seen: int
    scenario: str = ""
    group: str = ""
    group_reason: GroupReason | None = None
    joint_reason: JointReason | None = None
    num_asked: int = 1
    turn: int = 0
    brought_tokens: int = 0
    num_batched: int = 0
    degree: int = 1
    elastic_reason: ElasticReason | None = None
    lookup: str = ""


def describe_decision(
    view: FleetView,
    query: RouteQuery,
    decision: OffloadPlan,
    policy: RoutePolicy,
    offload: OffloadState,
    *,
    lookup: str = "",
) -> DecisionFacts:
    """Returns the facts of a decision that was made from these arguments."""
    is_finite = bool(offload.remote) and math.isfinite(offload.threshold_tokens)
    about = DecisionFacts(
        request_id=query.request_id,
        policy=policy.name,
        placement=None,
        reason="",
        detail="",
        num_tokens=query.num_tokens,
        prefill=(),
        decode=(),
        threshold_tokens=offload.threshold_tokens if is_finite else None,
        compared_tokens=decision.choice.compared_tokens if decision.choice else 0,
        cache_known=False,
        num_seen=len(view.workers),
        scenario=query.scenario,
        group=decision.group.group.name if decision.group and decision.group.group else "",
        group_reason=decision.group.reason if decision.group else None,
        lookup=lookup,
    )
    if decision.joint is not None:
        about = dataclasses.replace(
            about,
            joint_reason=decision.joint.reason,
            num_asked=decision.joint.num_asked,
            turn=decision.joint.turn,
            brought_tokens=decision.joint.brought_tokens,
            num_batched=decision.joint.num_batched,
            degree=decision.joint.degree,
            elastic_reason=decision.joint.elastic,
        )
    route = decision.route
    if isinstance(route, Refusal):
        return dataclasses.replace(about, reason=route.reason.value, detail=route.message)
    is_aggregated = route.placement is Placement.AGGREGATED
    rank = policy.aggregated if is_aggregated else policy.prefill
    return dataclasses.replace(
        about,
        placement=route.placement,
        reason=route.cause.value,
        detail=route.reason,
        prefill=_facts(route.prefill, view, query, rank),
        decode=_facts(route.decode, view, query, policy.decode),
        cache_known=route.cache_known,
    )


def _facts(
    candidates: tuple[Candidate, ...], view: FleetView, query: RouteQuery, rank: RankFunction
) -> tuple[CandidateFacts, ...]:
    shown = candidates[:MAX_EXPLAINED]
    names = {each.worker_id for each in shown}
    workers = {each.worker_id: each for each in view.workers if each.worker_id in names}
    return tuple(
        _fact(workers[each.worker_id], each, query, rank, view.reads.get(each.worker_id, 0.0))
        for each in shown
    )


def _fact(
    worker: WorkerView, candidate: Candidate, query: RouteQuery, rank: RankFunction, reads: float
) -> CandidateFacts:
    sooner = candidate.saved_tokens - candidate.load_tokens
    standing = Standing(worker, query, candidate.cached_tokens, turn=0, saved_tokens=sooner)
    if candidate.cached_tokens:
        standing.reads = reads
    return CandidateFacts(
        worker_id=worker.worker_id,
        cached_tokens=candidate.cached_tokens,
        score=tuple(float(value) for value in rank(standing)),
        prefill_used=worker.prefill_used,
        prefill_slots=worker.info.prefill_slots,
        decode_used=worker.decode_used,
        decode_slots=worker.info.decode_slots,
        blocks_free=worker.load.blocks_free,
        pending_tokens=worker.pending_tokens,
        fetch=candidate.fetch.value,
        source=candidate.source.worker_id if candidate.source else "",
        saved_tokens=candidate.saved_tokens,
        host_tokens=candidate.host_tokens,
        disk_tokens=candidate.disk_tokens,
        load_tokens=candidate.load_tokens,
    )
