"""Converts route queries and plans to messages and back; see `convert.py` for all other types.

Tests: tests/unit/rpc/test_convert.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from kvmesh.core.types import (
    Candidate,
    Endpoint,
    PrefixSource,
    RequestId,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.kv.hashing import JoinedHashes, join_hashes
from kvmesh.rpc.convert import (
    endpoint_from_proto,
    endpoint_to_proto,
    limit_from_ms,
    limit_to_ms,
    placement_from_proto,
    placement_to_proto,
)
from kvmesh.v1 import scheduler_service_pb2, types_pb2

_CAUSES = {cause.value: cause for cause in RouteCause}


def prefix_source_to_proto(source: PrefixSource) -> types_pb2.PrefixSource:
    """PrefixSource as a message."""
    upstream = source.upstream
    return types_pb2.PrefixSource(
        worker_id=source.worker_id,
        incarnation=source.incarnation,
        control_endpoint=endpoint_to_proto(source.control_endpoint),
        num_blocks=source.num_blocks,
        computes=source.computes,
        upstream=None if upstream is None else prefix_source_to_proto(upstream),
        before_load=source.before_load,
    )


def prefix_source_from_proto(message: types_pb2.PrefixSource) -> PrefixSource:
    """PrefixSource from a message."""
    return PrefixSource(
        WorkerId(message.worker_id),
        message.incarnation,
        endpoint_from_proto(message.control_endpoint),
        message.num_blocks,
        message.computes,
        prefix_source_from_proto(message.upstream) if message.HasField("upstream") else None,
        message.before_load,
    )


def fill_candidate(message: scheduler_service_pb2.Candidate, candidate: Candidate) -> None:
    """Writes a Candidate into an empty message, which may be part of another message."""
    message.worker_id = candidate.worker_id
    message.incarnation = candidate.incarnation
    endpoint, known = message.control_endpoint, candidate.control_endpoint
    endpoint.host, endpoint.port = known.host, known.port
    message.cached_tokens = candidate.cached_tokens
    if candidate.source is not None:
        message.source.CopyFrom(prefix_source_to_proto(candidate.source))
    if candidate.host_tokens or candidate.disk_tokens:
        message.host_tokens = candidate.host_tokens
        message.disk_tokens = candidate.disk_tokens


def candidate_from_proto(message: scheduler_service_pb2.Candidate) -> Candidate:
    """Candidate from a message."""
    endpoint = message.control_endpoint
    known = _candidate(
        message.worker_id,
        message.incarnation,
        endpoint.host,
        endpoint.port,
        message.cached_tokens,
    )
    host_tokens, disk_tokens = message.host_tokens, message.disk_tokens
    if host_tokens or disk_tokens:
        known = replace(known, host_tokens=host_tokens, disk_tokens=disk_tokens)
    if not message.HasField("source"):
        return known
    return replace(known, source=prefix_source_from_proto(message.source))


@lru_cache(maxsize=4096)
def _candidate(
    worker_id: str, incarnation: int, host: str, port: int, cached_tokens: int
) -> Candidate:
    """A cached value: most plans name the same workers again."""
    return Candidate(WorkerId(worker_id), incarnation, Endpoint(host, port), cached_tokens)


def route_query_to_proto(
    query: RouteQuery, correlation_id: int, traceparent: str = ""
) -> scheduler_service_pb2.RouteRequest:
    """RouteQuery as a message."""
    return scheduler_service_pb2.RouteRequest(
        correlation_id=correlation_id,
        request_id=query.request_id,
        model=query.model,
        num_tokens=query.num_tokens,
        max_new_tokens=query.max_new_tokens,
        block_hashes=join_hashes(query.block_hashes),
        scenario=query.scenario,
        avoid_worker_ids=sorted(query.avoid),
        ttft_budget_ms=query.ttft_budget_ms,
        placement=placement_to_proto(query.placement),
        traceparent=traceparent,
        waiting=query.waiting,
        waiting_reserved=query.waiting_reserved,
        waiting_remote=query.waiting_remote,
        lost_worker_ids=sorted(query.lost),
        unanswered_worker_ids=sorted(query.unanswered),
        model_fingerprint=query.fingerprint,
        tpot_ms=limit_to_ms(query.tpot_s),
        adapter=query.adapter,
    )


def route_query_from_proto(message: scheduler_service_pb2.RouteRequest) -> RouteQuery:
    """RouteQuery from a message."""
    return RouteQuery(
        request_id=RequestId(message.request_id),
        model=message.model,
        num_tokens=message.num_tokens,
        max_new_tokens=message.max_new_tokens,
        block_hashes=JoinedHashes(message.block_hashes),
        scenario=message.scenario,
        avoid=frozenset(WorkerId(name) for name in message.avoid_worker_ids),
        ttft_budget_ms=message.ttft_budget_ms,
        placement=placement_from_proto(message.placement),
        waiting=message.waiting,
        waiting_reserved=message.waiting_reserved,
        waiting_remote=message.waiting_remote,
        lost=frozenset(WorkerId(name) for name in message.lost_worker_ids),
        unanswered=frozenset(WorkerId(name) for name in message.unanswered_worker_ids),
        fingerprint=message.model_fingerprint,
        tpot_s=limit_from_ms(message.tpot_ms),
        adapter=message.adapter,
    )


def fill_route_plan(message: scheduler_service_pb2.RoutePlan, plan: RoutePlan) -> None:
    """Writes a RoutePlan into an empty message, which may be part of another message.

    This avoids copies: assigning a message copies it through its bytes, and a plan has four levels.
    """
    message.placement = placement_to_proto(plan.placement)
    for candidate in plan.prefill:
        fill_candidate(message.prefill.add(), candidate)
    for candidate in plan.decode:
        fill_candidate(message.decode.add(), candidate)
    message.cache_known = plan.cache_known
    message.reason = plan.reason
    message.policy = plan.policy
    message.cause = plan.cause.value
    message.remote = plan.remote


def route_plan_from_proto(message: scheduler_service_pb2.RoutePlan) -> RoutePlan:
    """RoutePlan from a message."""
    return RoutePlan(
        placement=placement_from_proto(message.placement),
        prefill=tuple(map(candidate_from_proto, message.prefill)),
        decode=tuple(map(candidate_from_proto, message.decode)),
        cache_known=message.cache_known,
        reason=message.reason,
        policy=message.policy,
        # A newer scheduler may send unknown words, an older one none.
        cause=_CAUSES.get(message.cause, RouteCause.LOAD),
        remote=message.remote,
    )
