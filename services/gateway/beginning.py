"""How a request begins the short way: with a plan made ahead, or with the scheduler's answer.

Only a request that stands behind nobody does; all others are placed by `placing.py`.
Tests: tests/integration/test_gateway_short_life.py, tests/integration/test_gateway_asked_life.py.
"""

from __future__ import annotations

import asyncio

from kvmesh.core.errors import LostError
from kvmesh.core.types import (
    BlockHash,
    Candidate,
    Placement,
    Refusal,
    RoutePlan,
    RouteQuery,
    SequenceSpec,
)
from kvmesh.core.values import changed
from kvmesh.kv.hashing import chain_hashes, root_hash
from kvmesh.rpc.convert import fill_sequence_spec
from kvmesh.rpc.convert_route import prefix_source_to_proto
from kvmesh.telemetry.tracing import is_tracing
from kvmesh.v1.decode_service_pb2 import DecodeRequest
from services.gateway.generation import Begun, FirstTry, place_until
from services.gateway.mesh import GenerationRequest, Mesh
from services.gateway.routing import ModelFacts
from services.gateway.short_life import ShortLife
from services.gateway.worker_sessions import WorkerSession


def short_life(mesh: Mesh, request: GenerationRequest, begun: Begun) -> ShortLife | None:
    """Sends a request to the worker of a plan made ahead; None if that cannot be.

    Args:
        begun: is told what was tried; nothing if `asked_life` cannot help either.
    """
    sampling, facts = request.sampling, mesh.router.facts
    if (
        facts is None
        or is_tracing()
        or _others_wait(mesh)
        or max(sampling.num_logprobs, sampling.num_prompt_logprobs) >= 0
    ):
        return None
    now = begun.arrived_at
    left_s = place_until(mesh, request, begun) - now
    if left_s <= 0:
        return None
    plan = mesh.router.planned(_query(request))
    begun.first_try = FirstTry(plan)
    return None if plan is None else _begin(mesh, request, begun, plan, facts, now, left_s)


async def asked_life(mesh: Mesh, request: GenerationRequest, begun: Begun) -> ShortLife | None:
    """Asks the scheduler, and sends the request to the worker of its plan; None if that cannot be.

    Args:
        begun: told by `short_life` that there was no plan; is told what was tried.
    """
    facts, loop = mesh.router.facts, asyncio.get_running_loop()
    left_s = place_until(mesh, request, begun) - loop.time()
    if facts is None or left_s <= 0:
        return None
    hashes = chain_hashes(_root(request, facts), request.prompt_ids, facts.block_size)
    query = changed(_query(request), block_hashes=tuple(hashes), ttft_budget_ms=_as_ms(left_s))
    tenant = request.tenant.name
    mesh.crowd.enter(tenant)
    mesh.waiting.count += 1
    try:
        plan = await mesh.router.route(query, request.traceparent, left_s)
    finally:
        mesh.waiting.count -= 1
        mesh.crowd.leave(tenant, loop.time(), placed=False)
    if _others_wait(mesh):
        return None  # it stands behind them, and asks when it is its turn
    begun.first_try = FirstTry(plan)
    now = loop.time()
    left_s = place_until(mesh, request, begun) - now
    if isinstance(plan, Refusal) or left_s <= 0:
        return None
    return _begin(mesh, request, begun, plan, facts, now, left_s)


def _others_wait(mesh: Mesh) -> bool:
    return mesh.turns.num_waiting > 0 or mesh.waiting.paused > 0


def _query(request: GenerationRequest) -> RouteQuery:
    """The question to the scheduler, without the hashes."""
    return RouteQuery(
        request_id=request.request_id,
        model=request.model,
        num_tokens=len(request.prompt_ids),
        max_new_tokens=request.sampling.max_tokens,
        scenario=request.scenario,
        placement=request.placement,
    )


def _root(request: GenerationRequest, facts: ModelFacts) -> BlockHash:
    return root_hash(facts.fingerprint, cache_salt=request.cache_salt)


def _as_ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _begin(
    mesh: Mesh,
    request: GenerationRequest,
    begun: Begun,
    plan: RoutePlan,
    facts: ModelFacts,
    now: float,
    left_s: float,
) -> ShortLife | None:
    """Sends a request to the first worker of a plan; None if the plan or the worker needs more."""
    if plan.placement is not Placement.AGGREGATED or not plan.prefill:
        return None
    candidate = plan.prefill[0]
    session = _session(mesh, candidate)
    if session is None:
        return None
    prompt_ids = request.prompt_ids
    spec = SequenceSpec(prompt_ids, len(prompt_ids), request.sampling, _root(request, facts))
    message = DecodeRequest()
    reserve = message.reserve
    fill_sequence_spec(reserve.sequence, spec)
    reserve.traceparent = request.traceparent
    reserve.start_within_ms = _as_ms(left_s)
    if candidate.source is not None:
        reserve.source.CopyFrom(prefix_source_to_proto(candidate.source))
    life = ShortLife(mesh, request, begun, session, plan, sent_at=now, place_until=now + left_s)
    life.start(message)
    return life


def _session(mesh: Mesh, candidate: Candidate) -> WorkerSession | None:
    """The session to a worker, if it is up and the worker starts what it reserves for."""
    try:
        session = mesh.sessions.session(candidate)
    except LostError:
        return None
    return session if session.decode.stream.connected and session.starts else None
