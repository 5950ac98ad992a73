"""Route plans: which workers to ask for a request, in which order, and why.

Pure: a function of (view, query, matches, now, rng). How workers are compared is in `ranking.py`.
Tests: tests/unit/policy/test_routing.py, test_routing_properties.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.core.types import (
    Candidate,
    FleetWorker,
    KvLayout,
    Placement,
    Refusal,
    RefusalReason,
    Role,
    RouteCause,
    RoutePlan,
    RouteQuery,
    WorkerId,
    WorkerLoad,
)
from kvmesh.policy.ranking import (
    CACHE_LOAD,
    HELP_SLOWDOWN,
    LEAST_CONNECTIONS,
    SLACK_TOKENS,
    TRANSFER_SHARE,
    RankFunction,
    RoutePolicy,
    Standing,
)
from kvmesh.policy.reasons import (
    decode_reason,
    no_pair,
    no_workers,
    prefill_reason,
    why_aggregated,
)
from kvmesh.policy.view import FleetView, WorkerView

SILENT_AFTER_S = 1.5
"""A worker without a report for this long (three intervals) is tried after the others."""

Group = tuple[KvLayout, str]
"""Workers of equal layout in one cluster: KV moves freely among them."""


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of one decision."""

    view: FleetView
    query: RouteQuery
    matches: Mapping[WorkerId, int] | None
    now: float
    rng: random.Random
    policy: RoutePolicy
    known: dict[WorkerId, Standing] = field(default_factory=dict)
    groups: dict[Group, int] = field(default_factory=dict)
    group_of: dict[WorkerId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sides:
    """Who may prefill and who may decode; no worker is in both."""

    prefill: list[WorkerView]
    decode: list[WorkerView]


def plan_route(
    view: FleetView,
    query: RouteQuery,
    matches: Mapping[WorkerId, int] | None,
    now: float,
    rng: random.Random,
    policy: RoutePolicy = CACHE_LOAD,
) -> RoutePlan | Refusal:
    """Decides where to run a request.

    A disaggregated plan never has one worker on both sides, and all its workers have one layout.

    Args:
        matches: leading blocks of the query that each worker holds; None when nobody knows.
        now: seconds on the clock of the view's `reported_at`.
        rng: breaks ties.

    Returns:
        A plan whose first candidates are the choice and the rest the fallbacks, or a refusal that
        says what is there. Both carry the reason.
    """
    call = _Call(view, query, matches, now, rng, policy)
    # Sorted, so that the order of the view decides nothing.
    by_id = sorted(view.workers, key=lambda worker: worker.worker_id)
    served = [worker for worker in by_id if worker.info.model == query.model]
    awake = [worker for worker in served if not worker.load.draining]
    if not awake:
        return no_workers(query, served, by_id)
    able = [worker for worker in awake if _longest_sequence(worker) >= query.num_tokens]
    if not able:
        return Refusal(
            RefusalReason.TOO_LONG,
            f"{query.num_tokens} tokens; the workers of {query.model} hold at most "
            f"{max(_longest_sequence(worker) for worker in awake)}",
        )
    if query.placement is Placement.AGGREGATED:
        return _plan_aggregated(call, able, RouteCause.ASKED, "asked for")
    if query.placement is Placement.AUTO and all(each.info.role is Role.HYBRID for each in able):
        # Nobody's role asks for them to be apart, so which side each would take does not matter.
        return _plan_aggregated(call, able, RouteCause.NO_PAIR, why_aggregated(able))
    sides = _split_sides(call, able)
    if query.placement is Placement.DISAGGREGATED:
        return _plan_disaggregated(call, sides) or no_pair(query, able)
    if not _has_default_pair(call, sides):
        return _plan_aggregated(call, able, RouteCause.NO_PAIR, why_aggregated(able))
    plan = (
        _plan_short(call, sides.decode)
        or _plan_help(call, sides)
        or _plan_disaggregated(call, sides)
    )
    assert plan is not None, "a default pair exists, so a pair does"
    return plan


def plan_without_scheduler(
    workers: tuple[FleetWorker, ...], query: RouteQuery, in_flight: Mapping[WorkerId, int]
) -> RoutePlan | Refusal:
    """Least connections over the last known view, for a gateway that reaches no scheduler.

    Args:
        workers: the last view; its loads are old, so only `draining` is read from them.
        in_flight: requests that the caller has at each worker now.
    """
    views = tuple(
        WorkerView(
            each.info,
            WorkerLoad(draining=each.load.draining, blocks_free=each.info.num_blocks),
            reported_at=0.0,
            prefill_in_flight=in_flight.get(each.info.worker_id, 0),
            decode_in_flight=in_flight.get(each.info.worker_id, 0),
        )
        for each in workers
    )
    # Keyed by the request: gateways that start out equal do not all take the same worker.
    rng = random.Random(query.request_id)
    return plan_route(FleetView(views), query, None, 0.0, rng, LEAST_CONNECTIONS)


def _longest_sequence(worker: WorkerView) -> int:
    info = worker.info
    return min(info.max_model_len, info.num_blocks * info.layout.block_size)


def _cached_tokens(call: _Call, worker: WorkerView) -> int:
    blocks = (call.matches or {}).get(worker.worker_id, 0)
    return min(blocks * worker.info.layout.block_size, call.query.num_tokens)


def _standing(call: _Call, worker: WorkerView) -> Standing:
    """Made once for each worker, since no rotation is asked for."""
    found = call.known.get(worker.worker_id)
    if found is None:
        found = Standing(worker, call.query, _cached_tokens(call, worker), turn=0)
        call.known[worker.worker_id] = found
    return found


def _standings(call: _Call, workers: list[WorkerView]) -> list[Standing]:
    if call.policy.basis is not RouteCause.ROTATION:
        return [_standing(call, worker) for worker in workers]
    count = len(workers)
    return [
        Standing(
            worker,
            call.query,
            _cached_tokens(call, worker),
            turn=(index - call.view.num_routes) % count,
        )
        for index, worker in enumerate(workers)
    ]


def _ordered(
    call: _Call,
    workers: list[WorkerView],
    rank: RankFunction,
    last_resort: Callable[[WorkerView], bool],
) -> list[Standing]:
    """Workers as they are to be tried; all of them, whatever speaks against one."""
    keyed = [
        (
            (
                standing.worker.worker_id in call.query.avoid,
                call.now - standing.worker.reported_at > SILENT_AFTER_S,
                last_resort(standing.worker),
                rank(standing),
                call.rng.random(),
            ),
            standing,
        )
        for standing in _standings(call, workers)
    ]
    keyed.sort(key=lambda pair: pair[0])
    return [standing for _, standing in keyed]


def _group(call: _Call, worker: WorkerView) -> int:
    """A number for its group; hashing a layout each time would be most of a decision's work."""
    number = call.group_of.get(worker.worker_id)
    if number is None:
        group = (worker.info.layout, worker.info.cluster)
        number = call.groups.setdefault(group, len(call.groups))
        call.group_of[worker.worker_id] = number
    return number


def _split_sides(call: _Call, workers: list[WorkerView]) -> _Sides:
    """Gives each hybrid worker the side that its group needs more for this request."""
    groups: dict[int, list[WorkerView]] = {}
    for worker in workers:
        groups.setdefault(_group(call, worker), []).append(worker)
    whole = _Sides([], [])
    for members in groups.values():
        sides = _Sides(
            [worker for worker in members if worker.info.role is Role.PREFILL],
            [worker for worker in members if worker.info.role is Role.DECODE],
        )
        hybrids = [worker for worker in members if worker.info.role is Role.HYBRID]
        for standing in _ordered(call, hybrids, call.policy.prefill, lambda _: False):
            _needier_side(call, sides).append(standing.worker)
        whole.prefill.extend(sides.prefill)
        whole.decode.extend(sides.decode)
    # By name again, so that turns of a rotation do not depend on loads.
    whole.prefill.sort(key=lambda worker: worker.worker_id)
    whole.decode.sort(key=lambda worker: worker.worker_id)
    return whole


def _needier_side(call: _Call, sides: _Sides) -> list[WorkerView]:
    if not sides.prefill or not sides.decode:
        return sides.decode if sides.prefill else sides.prefill
    ready_prefill = sum(not each.prefill_busy for each in _standings(call, sides.prefill))
    ready_decode = sum(not each.decode_full for each in _standings(call, sides.decode))
    return sides.prefill if ready_prefill < ready_decode else sides.decode


def _has_default_pair(call: _Call, sides: _Sides) -> bool:
    """Whether a group has both sides and someone whose role asks for them to be apart."""
    groups = {_group(call, worker) for worker in sides.prefill}
    groups &= {_group(call, worker) for worker in sides.decode}
    return any(
        _group(call, worker) in groups and worker.info.role is not Role.HYBRID
        for worker in (*sides.prefill, *sides.decode)
    )


def _plan_disaggregated(call: _Call, sides: _Sides) -> RoutePlan | None:
    ready = {
        _group(call, standing.worker)
        for standing in _standings(call, sides.decode)
        if not standing.decode_full and standing.worker.worker_id not in call.query.avoid
    }
    decode_layouts = {worker.info.layout for worker in sides.decode}
    paired = [worker for worker in sides.prefill if worker.info.layout in decode_layouts]
    if not paired:
        return None

    def is_crowded(worker: WorkerView) -> bool:
        return _group(call, worker) not in ready

    # The best prefill worker that has decode room beside it says where the request goes.
    home = _ordered(call, paired, call.policy.prefill, is_crowded)
    layout, cluster = home[0].worker.info.layout, home[0].worker.info.cluster

    def is_far(worker: WorkerView) -> bool:
        return worker.info.cluster != cluster

    rest = [worker for worker in paired if worker.info.layout == layout]
    rest.remove(home[0].worker)
    prefill = [home[0], *_ordered(call, rest, call.policy.prefill, is_far)]
    prefill = _worth_asking(call, prefill)
    decode = _ordered(
        call,
        [worker for worker in sides.decode if worker.info.layout == layout],
        call.policy.decode,
        is_far,
    )
    reason = f"{prefill_reason(prefill[0])}; {decode_reason(decode[0])}"
    hit = call.policy.reads_cache and prefill[0].cached_tokens > 0
    cause = RouteCause.PREFIX if hit else call.policy.basis
    return _plan(call, prefill, decode, cause, reason)


def _plan_short(call: _Call, decode: list[WorkerView]) -> RoutePlan | None:
    """The prompt on a decode worker that has room for it, if little of it is left to compute.

    Nothing has to be transferred then. A follow-up of a conversation is the common case: the worker
    that generated the last answer holds all but the new words. None: no worker fits.
    """
    fitting = [
        standing.worker
        for standing in _standings(call, decode)
        if standing.uncached_tokens <= call.policy.aggregate_tokens
        and standing.takes_short_prompt
        and _is_in_favour(call, standing)
    ]
    if not fitting:
        return None
    ordered = _ordered(call, fitting, call.policy.aggregated, lambda _: False)
    reason = f"aggregated, a short prompt: {prefill_reason(ordered[0])}"
    return _plan(call, ordered, [], RouteCause.SHORT_PROMPT, reason)


def _plan_help(call: _Call, sides: _Sides) -> RoutePlan | None:
    """The prompt on a decode worker, where the first token comes before any prefill worker's."""
    cost = call.policy.first_token
    if cost is None or not call.policy.aggregate_tokens:
        return None
    helpers = [
        (cost(standing) * HELP_SLOWDOWN, standing.worker.worker_id, standing)
        for standing in _standings(call, sides.decode)
        if standing.may_help_prefill and _is_in_favour(call, standing)
    ]
    if not helpers:
        return None
    there, _, best = min(helpers)
    sending = TRANSFER_SHARE * call.query.num_tokens
    if there >= sending + min(cost(standing) for standing in _standings(call, sides.prefill)):
        return None
    reason = f"aggregated, prefill workers are later: {prefill_reason(best)}"
    return _plan(call, [best], [], RouteCause.HELP, reason)


def _is_in_favour(call: _Call, standing: Standing) -> bool:
    """It has neither refused nor fallen silent."""
    worker = standing.worker
    is_awake = call.now - worker.reported_at <= SILENT_AFTER_S
    return is_awake and worker.worker_id not in call.query.avoid


def _worth_asking(call: _Call, prefill: list[Standing]) -> list[Standing]:
    """Leaves out workers that are much later than the best of those that are left."""
    cost = call.policy.first_token
    if cost is None:
        return prefill
    best = min(
        (cost(standing) for standing in prefill if _is_in_favour(call, standing)),
        default=math.inf,
    )
    return [standing for standing in prefill if cost(standing) <= best + SLACK_TOKENS]


def _plan_aggregated(
    call: _Call, workers: list[WorkerView], cause: RouteCause, why: str
) -> RoutePlan:
    def is_dedicated(worker: WorkerView) -> bool:
        return worker.info.role is not Role.HYBRID

    ordered = _ordered(call, workers, call.policy.aggregated, is_dedicated)
    reason = f"aggregated, {why}: {prefill_reason(ordered[0])}"
    return _plan(call, ordered, [], cause, reason)


def _plan(
    call: _Call,
    prefill: Iterable[Standing],
    decode: list[Standing],
    cause: RouteCause,
    reason: str,
) -> RoutePlan:
    """A plan; aggregated without decode candidates."""
    return RoutePlan(
        placement=Placement.DISAGGREGATED if decode else Placement.AGGREGATED,
        prefill=tuple(_candidate(standing) for standing in prefill),
        decode=tuple(_candidate(standing) for standing in decode),
        cache_known=call.matches is not None,
        reason=reason,
        policy=call.policy.name,
        cause=cause,
    )


def _candidate(standing: Standing) -> Candidate:
    info = standing.worker.info
    return Candidate(
        info.worker_id, info.incarnation, info.control_endpoint, standing.cached_tokens
    )
