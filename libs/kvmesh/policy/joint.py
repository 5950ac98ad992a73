"""Routes requests that arrive at the same time together, dividing their prompts among workers.

First each request is decided as if they came one by one. That settles its placement, its decode
worker and everything except the prefill worker. Then the prompts of disaggregated requests are
divided anew by the policy's rule (`joint_queues.py`). The time of a prompt includes its fetch and
the worker's queue, so `FIRST_TOKEN` moves the least KV that load allows. A division that is not
better than one by one is dropped. `VOLUME` may give several idle workers to a long prompt
(`chain.py`). Pure.
Source: TokenLake 5, 6.2. Tests: tests/unit/policy/test_joint.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmesh.core.types import (
    Candidate,
    Placement,
    Refusal,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
)
from kvmesh.policy.chain import chaining, upstream_parts
from kvmesh.policy.composition import Composition, decide_route
from kvmesh.policy.fetch_route import fetch_words
from kvmesh.policy.joint_choice import ALONE, JointChoice, JointReason, JointRule
from kvmesh.policy.joint_queues import (
    Division,
    JointPrompt,
    Queues,
    Seat,
    by_time,
    by_volume,
    first_token,
    in_order_of_asking,
    total_tokens,
)
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.offload_route import OffloadPlan
from kvmesh.policy.ranking import SLACK_TOKENS, Standing
from kvmesh.policy.reasons import decode_reason, prefill_reason
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView

T = TypeVar("T")

MAX_JOINT = 8
"""Maximum number of requests decided together; more are split into consecutive batches."""

WORTH_TOKENS = 1.0
"""Minimum number of computed tokens that a joint decision saves; below it the requests stay as
decided one by one."""

_BY_LOAD = frozenset((RouteCause.PREFIX, RouteCause.FETCH, RouteCause.LOAD))
"""Causes that explain the choice of the prefill worker; the other causes explain its cluster."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that waits for its route.

    Attributes:
        view: workers to choose from.
        matches: number of the query's leading blocks that each worker holds; None: not known.
    """

    query: RouteQuery
    view: FleetView
    matches: Mapping[WorkerId, int] | None


def decide_jointly(
    policy: Composition, asks: Sequence[Ask], now: float, offload: OffloadState
) -> list[OffloadPlan]:
    """Decides where to run requests that arrive at the same time (TokenLake 5, 6.2).

    The order of the requests only breaks ties.

    Args:
        policy: its `joint` is the rule by which the prompts are divided.
        now: seconds on the clock of the views' `reported_at`.

    Returns:
        A decision for each request, in their order. The caller answers requests with a smaller
        `joint.turn` first, so that their prompts arrive first.
    """
    assert policy.joint is not None, f"{policy.name} decides one by one"
    if len(asks) == 1:
        ask = asks[0]
        alone = decide_route(policy, ask.view, ask.query, ask.matches, now, offload)
        return [dataclasses.replace(alone, joint=ALONE)]
    plans, beside = _one_by_one(policy, asks, now, offload)
    fixed = JointChoice(JointReason.FIXED, len(asks))
    decided = [dataclasses.replace(plan, joint=fixed) for plan in plans]
    prompts = [
        prompt
        for index, ask in enumerate(asks)
        if (prompt := _prompt(index, ask, plans[index].route, now, beside, policy)) is not None
    ]
    before = in_order_of_asking(prompts)
    is_volume = policy.joint is JointRule.VOLUME
    after = by_volume(prompts) if is_volume else Division(by_time(prompts))
    saved = total_tokens(before) - total_tokens(after.queues) + after.saved
    if not is_volume and saved < WORTH_TOKENS:
        after, saved = Division(before), 0.0
    routes = _chained(_routes(after.queues, asks, plans), after, asks, now)
    for worker_id, queue in after.queues.items():
        for turn, each in enumerate(queue):
            reason = JointReason.KEPT if worker_id == each.own else JointReason.MOVED
            brought = each.seats[worker_id].brought
            choice = JointChoice(reason, len(asks), turn, saved, brought)
            route = routes[each.index]
            if after.reason is not None:
                degree = 1 + len(upstream_parts(route.prefill[0].source))
                choice = dataclasses.replace(
                    choice, num_batched=len(queue), degree=degree, elastic=after.reason
                )
                route = dataclasses.replace(route, reason=f"{route.reason}; {_batch_words(choice)}")
            plan = plans[each.index]
            decided[each.index] = dataclasses.replace(plan, route=route, joint=choice)
    return decided


def in_turn(asked: Sequence[T], plans: Sequence[OffloadPlan]) -> list[tuple[T, OffloadPlan]]:
    """Returns pairs of asker and decision in the order in which they are answered.

    Prompts that a worker computes first are answered first, so that they arrive there first.
    """
    pairs = list(zip(asked, plans, strict=True))
    return sorted(pairs, key=lambda pair: pair[1].joint.turn if pair[1].joint is not None else 0)


def hold_s(policy: Composition, ask: Ask, now: float, offload: OffloadState) -> float:
    """Returns the seconds that a request may wait for others to be decided with it.

    The wait lasts until the first worker could begin its prompt, and at most the policy's window:
    waiting costs nothing only where the prompt would wait anyway. It is 0 where other requests
    cannot change the decision: for a refusal and for aggregated placement.
    """
    able = [
        worker
        for worker in ask.view.workers
        if worker.info.model == ask.query.model
        and worker.info.role is not Role.DECODE
        and not worker.load.draining
    ]
    soonest_s = min((_busy_s(worker, ask) for worker in able), default=0.0)
    wait_s = min(soonest_s, policy.joint_window_s)
    if wait_s <= 0:
        return 0.0
    route = decide_route(policy, ask.view, ask.query, ask.matches, now, offload).route
    is_fixed = isinstance(route, Refusal) or route.placement is Placement.AGGREGATED
    return 0.0 if is_fixed else wait_s


def _busy_s(worker: WorkerView, ask: Ask) -> float:
    """Returns the seconds until a worker could begin the prompt; infinite if its speed is
    unknown.
    """
    if not worker.prefill_used:
        return 0.0
    token_s = ask.view.pace.token_s
    before = worker.pending_tokens + worker.prefill_in_flight * ask.query.num_tokens
    return before * token_s if token_s else math.inf


# --- one by one ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Added:
    """Load that the decisions made just before add to a worker.

    Attributes:
        prompts, tokens: added to prefill.
        sequences, blocks: added to decode.
    """

    prompts: int = 0
    tokens: int = 0
    sequences: int = 0
    blocks: int = 0


def _one_by_one(
    policy: Composition, asks: Sequence[Ask], now: float, offload: OffloadState
) -> tuple[list[OffloadPlan], Mapping[WorkerId, _Added]]:
    """Decides each request as if the ones before it were already on their workers.

    Returns:
        The decisions, and per worker the load of aggregated prompts, which are not divided.
    """
    # No slack limit: a worker that is late for one prompt may be the best for one of many. Chains
    # come last, of workers that are idle then.
    loose = dataclasses.replace(
        policy, route=dataclasses.replace(policy.route, slack_tokens=math.inf), chains=False
    )
    added: dict[WorkerId, _Added] = defaultdict(_Added)
    beside: dict[WorkerId, _Added] = defaultdict(_Added)
    plans: list[OffloadPlan] = []
    for ask in asks:
        view = _with_added(ask.view, added)
        planned = decide_route(loose, view, ask.query, ask.matches, now, offload)
        plans.append(planned)
        route = planned.route
        if isinstance(route, RoutePlan):
            first = route.prefill[0]
            uncached = max(ask.query.num_tokens - first.cached_tokens, 1)
            is_aggregated = route.placement is Placement.AGGREGATED
            for sums in (added, beside) if is_aggregated else (added,):
                sums[first.worker_id].prompts += 1
                sums[first.worker_id].tokens += uncached
            decode = first if is_aggregated else route.decode[0]
            size = next(w for w in view.workers if w.worker_id == decode.worker_id).info.layout
            left = ask.query.num_tokens - decode.cached_tokens
            added[decode.worker_id].sequences += 1
            added[decode.worker_id].blocks += left // size.block_size + 1
    return plans, beside


def _with_added(view: FleetView, added: Mapping[WorkerId, _Added]) -> FleetView:
    """Returns the view with the added load on its workers."""
    if not added:
        return view
    workers = tuple(
        _loaded(worker, added[worker.worker_id]) if worker.worker_id in added else worker
        for worker in view.workers
    )
    return dataclasses.replace(view, workers=workers)


def _loaded(worker: WorkerView, more: _Added) -> WorkerView:
    load = dataclasses.replace(
        worker.load,
        prefill_active=worker.load.prefill_active + more.prompts,
        decode_reserved=worker.load.decode_reserved + more.sequences,
        blocks_free=max(worker.load.blocks_free - more.blocks, 0),
    )
    return dataclasses.replace(
        worker, load=load, pending_tokens=worker.pending_tokens + more.tokens
    )


def _prompt(
    index: int,
    ask: Ask,
    route: RoutePlan | Refusal,
    now: float,
    beside: Mapping[WorkerId, _Added],
    policy: Composition,
) -> JointPrompt | None:
    """Returns the prompt with the workers that may compute it; None if there is no choice."""
    query = ask.query
    if not isinstance(route, RoutePlan) or route.placement is Placement.AGGREGATED:
        return None
    # Aggregated prompts among these requests add to their workers' load.
    views = {worker.worker_id: worker for worker in _with_added(ask.view, beside).workers}
    home = views[route.prefill[0].worker_id].info.cluster
    seats: dict[WorkerId, Seat] = {}
    for candidate in route.prefill:
        worker = views[candidate.worker_id]
        is_silent = worker.reported_at < now - SILENT_AFTER_S
        if is_silent or candidate.worker_id in query.avoid or worker.info.cluster != home:
            continue
        seats[candidate.worker_id] = _seat(worker, candidate, query)
    if not seats:
        return None
    token_s = ask.view.pace.token_s
    is_known = query.ttft_budget_ms and token_s
    objective = query.ttft_budget_ms / 1e3 / token_s if is_known else math.inf
    times = _times(ask, seats, now) if policy.chains else ()
    return JointPrompt(index, query.num_tokens, objective, seats, times)


def _times(ask: Ask, seats: Mapping[WorkerId, Seat], now: float) -> tuple[float, ...]:
    """Returns the computed tokens of a prompt on 1, 2, ... idle workers; empty: only one may."""
    for seat in sorted(seats.values(), key=lambda seat: seat.work):
        chain = chaining(seat.candidate, ask.view, ask.query, ask.matches, now)
        if chain is not None:
            return chain.times
    return ()


def _seat(worker: WorkerView, candidate: Candidate, query: RouteQuery) -> Seat:
    uncached = max(query.num_tokens - candidate.cached_tokens, 1)
    source = candidate.source
    held = source.num_blocks * worker.info.layout.block_size if source is not None else 0
    return Seat(
        worker,
        candidate,
        wait=worker.pending_tokens + worker.prefill_in_flight * query.num_tokens,
        work=uncached + candidate.load_tokens - candidate.saved_tokens,
        free=worker.info.prefill_slots - worker.prefill_used,
        brought=max(min(held, query.num_tokens) - candidate.cached_tokens, 0),
    )


# --- the plan of each ----------------------------------------------------------------------------


def _routes(
    queues: Queues, asks: Sequence[Ask], plans: Sequence[OffloadPlan]
) -> dict[int, RoutePlan]:
    """Returns the plans of divided prompts by the index of their request."""
    return {
        each.index: _settled(
            each, each.seats[name], queues, asks[each.index], plans[each.index].route
        )
        for name, queue in queues.items()
        for each in queue
    }


def _chained(
    routes: dict[int, RoutePlan], division: Division, asks: Sequence[Ask], now: float
) -> dict[int, RoutePlan]:
    """Lets each prompt that got several workers have them: idle ones without another prompt."""
    taken = frozenset(division.queues)
    for name, degree in division.degrees.items():
        (prompt,) = division.queues[name]
        ask, route = asks[prompt.index], routes[prompt.index]
        last = route.prefill[0]
        chain = chaining(last, ask.view, ask.query, ask.matches, now, taken - {name})
        if chain is not None:
            route = routes[prompt.index] = chain.extend(route, degree)
            taken |= {each.worker_id for each in upstream_parts(route.prefill[0].source)}
    return routes


def _batch_words(choice: JointChoice) -> str:
    assert choice.elastic is not None
    others = f" with {choice.num_batched - 1} others" if choice.num_batched > 1 else ""
    workers = "worker" if choice.degree == 1 else "workers"
    return f"batched{others} on {choice.degree} {workers}, {choice.elastic.value}"


def _settled(
    prompt: JointPrompt, chosen: Seat, queues: Queues, ask: Ask, route: RoutePlan | Refusal
) -> RoutePlan:
    """Returns the plan with the chosen worker first, then the others that are worth asking."""
    assert isinstance(route, RoutePlan), "what was divided had a plan"
    query = ask.query

    views = {worker.worker_id: worker for worker in ask.view.workers}
    # Workers without a seat (far, silent, avoided) stay last resorts, as one by one.
    others = [
        _seat(views[each.worker_id], each, query)
        for each in route.prefill
        if each.worker_id not in prompt.seats
    ]
    rest = [*(seat for seat in prompt.seats.values() if seat is not chosen), *others]
    latest = first_token(queues, chosen, prompt) + SLACK_TOKENS
    worth = [seat.candidate for seat in rest if first_token(queues, seat, prompt) <= latest]
    decode = views[route.decode[0].worker_id]
    standing = _standing(chosen, query)
    beside = Standing(decode, query, route.decode[0].cached_tokens, 0)
    return dataclasses.replace(
        route,
        prefill=(chosen.candidate, *worth),
        reason=f"{prefill_reason(standing)}{fetch_words(standing)}; {decode_reason(beside)}",
        cause=_cause(chosen.candidate) if route.cause in _BY_LOAD else route.cause,
    )


def _standing(seat: Seat, query: RouteQuery) -> Standing:
    candidate = seat.candidate
    sooner = candidate.saved_tokens - candidate.load_tokens
    standing = Standing(seat.worker, query, candidate.cached_tokens, 0, sooner)
    standing.source, standing.fetch = candidate.source, candidate.fetch
    return standing


def _cause(candidate: Candidate) -> RouteCause:
    if candidate.source is not None:
        return RouteCause.FETCH
    return RouteCause.PREFIX if candidate.cached_tokens else RouteCause.LOAD
