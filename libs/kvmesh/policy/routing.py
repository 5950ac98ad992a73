"""Route plans: which workers to ask for a request, in which order, and why.

Pure: a function of (view, query, matches, now, rng). How workers are compared is in `ranking.py`.
Tests: tests/unit/policy/test_routing.py, test_routing_properties.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from kvmesh.core.details import FleetWorker
from kvmesh.core.types import (
    Candidate,
    FetchReason,
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
from kvmesh.policy.fetch_route import Decoders, fetch_words, weigh_fetches
from kvmesh.policy.holders import held_by
from kvmesh.policy.ranking import (
    CACHE_LOAD,
    HELP_SLOWDOWN,
    LEAST_CONNECTIONS,
    TRANSFER_SHARE,
    Rank,
    RankFunction,
    RoutePolicy,
    Standing,
)
from kvmesh.policy.reasons import decode_reason, no_pair, no_workers, prefill_reason, why_aggregated
from kvmesh.policy.view import FleetView, WorkerView

SILENT_AFTER_S = 1.5
"""A worker without a report for this long (three intervals) is tried after the others."""

Group = tuple[int, str]
"""Workers of equal layout (by number) in one cluster: KV moves freely among them."""

LastResort = Callable[["_Seat"], bool] | None
"""Who is tried after all others; None: nobody in particular."""


@dataclass(slots=True)
class _Call:
    """The arguments of one decision, and the layouts and groups that it has met."""

    view: FleetView
    query: RouteQuery
    matches: Mapping[WorkerId, int] | None
    now: float
    rng: random.Random
    policy: RoutePolicy
    layouts: list[KvLayout] = field(default_factory=list)
    groups: set[Group] = field(default_factory=set)


class _Seat(Standing):
    """A worker's standing in one decision.

    Attributes:
        avoided: it refused, or failed.
        silent: its last report is old.
        layout: number of its KV layout; hashing one each time would be much of a decision's work.
    """

    __slots__ = ("avoided", "group", "layout", "silent")

    avoided: bool
    silent: bool
    layout: int
    group: Group


def _take_seats(call: _Call, able: list[WorkerView]) -> list[_Seat]:
    """The standings of all workers; in one loop, since a route spends most of its time here."""
    query, layouts = call.query, call.layouts
    num_tokens, avoid = query.num_tokens, query.avoid
    heard_since = call.now - SILENT_AFTER_S
    held = held_by(call.matches, [worker.info.worker_id for worker in able])
    reads = call.view.reads
    seats: list[_Seat] = []
    group: Group = (-1, "")
    known: KvLayout | None = None
    number = 0
    for worker, blocks in zip(able, held, strict=True):
        info = worker.info
        layout = info.layout
        cached = min(blocks * layout.block_size, num_tokens) if blocks else 0
        seat = _Seat(worker, query, cached, 0)
        if blocks:
            seat.reads = reads.get(info.worker_id, 0.0)
        seat.avoided = info.worker_id in avoid
        seat.silent = worker.reported_at < heard_since
        if layout is not known:
            known, number = layout, _layout_number(layouts, layout)
        seat.layout = number
        if group[0] != number or group[1] != info.cluster:
            group = (number, info.cluster)
            call.groups.add(group)
        seat.group = group
        seats.append(seat)
    return seats


def _of_layout(call: _Call, seats: list[_Seat], layout: int) -> list[_Seat]:
    if len(call.layouts) == 1:
        return seats
    return [seat for seat in seats if seat.layout == layout]


def _decoders(seats: list[_Seat], policy: RoutePolicy) -> Decoders:
    able = [s for s in seats if s.worker.info.role is not Role.PREFILL and _is_in_favour(s)]
    return Decoders(able, policy.decode)


def _layout_number(known: list[KvLayout], layout: KvLayout) -> int:
    for number, each in enumerate(known):
        if each is layout or each == layout:
            return number
    known.append(layout)
    return len(known) - 1


@dataclass(frozen=True, slots=True)
class _Sides:
    """Who may prefill and who may decode, by name; no worker is in both."""

    prefill: list[_Seat]
    decode: list[_Seat]


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
    # Sorted, so that the order of the view decides nothing.
    by_id = sorted(view.workers, key=_WORKER_ID)
    needed = query.num_tokens
    able = [
        worker
        for worker in by_id
        if worker.info.model == query.model
        and not worker.load.draining
        and worker.info.max_model_len >= needed
        and worker.info.num_blocks * worker.info.layout.block_size >= needed
    ]
    if not able:
        return _nobody(query, by_id)
    call = _Call(view, query, matches, now, rng, policy)
    seats = _take_seats(call, able)
    all_hybrid = query.placement is Placement.AUTO and all(
        each.info.role is Role.HYBRID for each in able
    )
    if policy.fetches and matches:
        apart = query.placement is not Placement.AGGREGATED and not all_hybrid
        _weigh_fetches(call, seats, apart=apart)
    if query.placement is Placement.AGGREGATED:
        return _plan_aggregated(call, seats, RouteCause.ASKED, "asked for")
    if all_hybrid:
        # Nobody's role asks for them to be apart, so which side each would take does not matter.
        return _plan_aggregated(call, seats, RouteCause.NO_PAIR, why_aggregated(able))
    sides = _split_sides(call, seats)
    if query.placement is Placement.DISAGGREGATED:
        return _plan_disaggregated(call, sides) or no_pair(query, able)
    if not _has_default_pair(sides):
        return _plan_aggregated(call, seats, RouteCause.NO_PAIR, why_aggregated(able))
    plan = (
        _plan_short(call, sides.decode)
        or _plan_help(call, sides)
        or _plan_disaggregated(call, sides)
    )
    assert plan is not None, "a default pair exists, so a pair does"
    return plan


def _weigh_fetches(call: _Call, seats: list[_Seat], *, apart: bool) -> None:
    """Says of each seat whom it fetches a prefix from.

    Args:
        apart: prefill and decode may be on two workers, so that one may ask the other.
    """
    pace = call.view.pace
    for layout in range(len(call.layouts)):
        members = _of_layout(call, seats, layout)
        holders = [seat for seat in members if not seat.silent]
        decoders = _decoders(members, call.policy) if apart and pace.ask_chunk_s else None
        weigh_fetches(members, holders, pace, call.rng, decoders)


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


_WORKER_ID = attrgetter("info.worker_id")


def _longest_sequence(worker: WorkerView) -> int:
    info = worker.info
    return min(info.max_model_len, info.num_blocks * info.layout.block_size)


def _nobody(query: RouteQuery, by_id: list[WorkerView]) -> Refusal:
    """Why no worker takes the query."""
    served = [worker for worker in by_id if worker.info.model == query.model]
    awake = [worker for worker in served if not worker.load.draining]
    if not awake:
        return no_workers(query, served, by_id)
    return Refusal(
        RefusalReason.TOO_LONG,
        f"{query.num_tokens} tokens; the workers of {query.model} hold at most "
        f"{max(_longest_sequence(worker) for worker in awake)}",
    )


def _ordered(
    call: _Call, seats: list[_Seat], rank: RankFunction, last_resort: LastResort
) -> list[_Seat]:
    """Workers as they are to be tried; all of them, whatever speaks against one."""
    keyed = _keyed(call, seats, rank, last_resort)
    keyed.sort()
    return [seats[key[5]] for key in keyed]


def _first(call: _Call, seats: list[_Seat], rank: RankFunction, last_resort: LastResort) -> _Seat:
    """The one that is to be tried first."""
    return seats[min(_keyed(call, seats, rank, last_resort))[5]]


def _keyed(
    call: _Call, seats: list[_Seat], rank: RankFunction, last_resort: LastResort
) -> list[tuple[bool, bool, bool, Rank, float, int]]:
    """What says which worker is tried before which; the last number is its place in `seats`."""
    if call.policy.basis is RouteCause.ROTATION:
        for index, seat in enumerate(seats):
            seat.turn = (index - call.view.num_routes) % len(seats)
    tie = call.rng.random
    if last_resort is None:
        return [
            (seat.avoided, seat.silent, False, rank(seat), tie(), index)
            for index, seat in enumerate(seats)
        ]
    return [
        (seat.avoided, seat.silent, last_resort(seat), rank(seat), tie(), index)
        for index, seat in enumerate(seats)
    ]


def _split_sides(call: _Call, seats: list[_Seat]) -> _Sides:
    """Gives each hybrid worker the side that its group needs more for this request."""
    whole = _Sides(
        [seat for seat in seats if seat.worker.info.role is Role.PREFILL],
        [seat for seat in seats if seat.worker.info.role is Role.DECODE],
    )
    if len(whole.prefill) + len(whole.decode) == len(seats):
        return whole
    for group in dict.fromkeys(seat.group for seat in seats):
        members = [seat for seat in seats if seat.group == group]
        hybrids = [seat for seat in members if seat.worker.info.role is Role.HYBRID]
        sides = _Sides(
            [seat for seat in members if seat.worker.info.role is Role.PREFILL],
            [seat for seat in members if seat.worker.info.role is Role.DECODE],
        )
        for seat in _ordered(call, hybrids, call.policy.prefill, None):
            side = _needier_side(sides)
            side.append(seat)
            (whole.prefill if side is sides.prefill else whole.decode).append(seat)
    # By name again, so that turns of a rotation do not depend on loads.
    for side in (whole.prefill, whole.decode):
        side.sort(key=lambda seat: seat.worker.info.worker_id)
    return whole


def _needier_side(sides: _Sides) -> list[_Seat]:
    if not sides.prefill or not sides.decode:
        return sides.decode if sides.prefill else sides.prefill
    ready_prefill = sum(not seat.prefill_busy for seat in sides.prefill)
    ready_decode = sum(not seat.decode_full for seat in sides.decode)
    return sides.prefill if ready_prefill < ready_decode else sides.decode


def _has_default_pair(sides: _Sides) -> bool:
    """Whether a group has both sides and someone whose role asks for them to be apart."""
    if not sides.prefill or not sides.decode:
        return False
    groups = {seat.group for seat in sides.prefill}
    groups &= {seat.group for seat in sides.decode}
    for seat in (*sides.prefill, *sides.decode):
        if seat.worker.info.role is not Role.HYBRID and seat.group in groups:
            return True
    return False


def _plan_disaggregated(call: _Call, sides: _Sides) -> RoutePlan | None:
    paired = sides.prefill
    if len(call.layouts) > 1:
        decode_layouts = {seat.layout for seat in sides.decode}
        paired = [seat for seat in paired if seat.layout in decode_layouts]
    if not paired or not sides.decode:
        return None

    # The best prefill worker that has decode room beside it says where the request goes.
    home = _first(call, paired, call.policy.prefill, _crowded(call, sides.decode))
    layout, cluster = home.group

    def is_far(seat: _Seat) -> bool:
        return seat.group[1] != cluster

    last_resort = is_far if len(call.groups) > 1 else None
    rest = [seat for seat in _of_layout(call, paired, layout) if seat is not home]
    prefill = [home, *_ordered(call, rest, call.policy.prefill, last_resort)]
    prefill = _worth_asking(call, prefill, home.group)
    beside = _of_layout(call, sides.decode, layout)
    decode = _ordered(call, beside, call.policy.decode, last_resort)
    first = prefill[0]
    reason = f"{prefill_reason(first)}{fetch_words(first)}; {decode_reason(decode[0])}"
    cause = call.policy.basis
    if first.source is not None:
        cause = RouteCause.FETCH
    elif call.policy.reads_cache and first.cached_tokens > 0:
        cause = RouteCause.PREFIX
    return _plan(call, prefill, decode, cause, reason)


def _crowded(call: _Call, decode: list[_Seat]) -> LastResort:
    """Who has no decode room beside it; nobody in a fleet of one group, where it says nothing."""
    if len(call.groups) == 1:
        return None
    ready = {seat.group for seat in decode if not seat.decode_full and not seat.avoided}
    return lambda seat: seat.group not in ready


def _plan_short(call: _Call, decode: list[_Seat]) -> RoutePlan | None:
    """The prompt on a decode worker that has room for it, if little of it is left to compute.

    Nothing has to be transferred then. A follow-up of a conversation is the common case: the worker
    that generated the last answer holds all but the new words. None: no worker fits.
    """
    most = call.policy.aggregate_tokens
    fitting = [
        seat
        for seat in decode
        if seat.uncached_tokens <= most and seat.takes_short_prompt and _is_in_favour(seat)
    ]
    if not fitting:
        return None
    ordered = _ordered(call, fitting, call.policy.aggregated, None)
    reason = f"aggregated, a short prompt: {prefill_reason(ordered[0])}"
    return _plan(call, ordered, [], RouteCause.SHORT_PROMPT, reason)


def _plan_help(call: _Call, sides: _Sides) -> RoutePlan | None:
    """The prompt on a decode worker, where the first token comes before any prefill worker's."""
    cost = call.policy.first_token
    if cost is None or not call.policy.aggregate_tokens:
        return None
    sending = TRANSFER_SHARE * call.query.num_tokens
    # Who has refused this request is no measure of when its first token comes, while others are.
    measures = [seat for seat in sides.prefill if _is_in_favour(seat)] or sides.prefill
    latest = sending + min(map(cost, measures))
    helpers = [
        seat
        for seat in sides.decode
        if cost(seat) * HELP_SLOWDOWN < latest
        and seat.may_help_prefill
        and _is_in_favour(seat)
        # A hybrid's cost may count on asking whoever decodes: that would be itself.
        and seat.fetch is not FetchReason.ASK
    ]
    if not helpers:
        return None
    best = min(helpers, key=cost)  # the first by name of several
    reason = f"aggregated, prefill workers are later: {prefill_reason(best)}{fetch_words(best)}"
    return _plan(call, [best], [], RouteCause.HELP, reason)


def _is_in_favour(seat: _Seat) -> bool:
    """It has neither refused nor fallen silent."""
    return not (seat.silent or seat.avoided)


def _worth_asking(call: _Call, prefill: list[_Seat], home: Group) -> list[_Seat]:
    """Leaves out workers that are much later than the best one of the group that was chosen: one
    of another is no measure, since that group has no room to decode.
    """
    cost = call.policy.first_token
    if cost is None:
        return prefill
    costs = [
        cost(seat) for seat in prefill if seat.group == home and not (seat.silent or seat.avoided)
    ]
    latest = min(costs, default=math.inf) + call.policy.slack_tokens
    return [seat for seat in prefill if cost(seat) <= latest]


def _plan_aggregated(call: _Call, seats: list[_Seat], cause: RouteCause, why: str) -> RoutePlan:
    def is_dedicated(seat: _Seat) -> bool:
        return seat.worker.info.role is not Role.HYBRID

    ordered = _ordered(call, seats, call.policy.aggregated, is_dedicated)
    reason = f"aggregated, {why}: {prefill_reason(ordered[0])}{fetch_words(ordered[0])}"
    return _plan(call, ordered, [], cause, reason)


def _plan(
    call: _Call,
    prefill: list[_Seat],
    decode: list[_Seat],
    cause: RouteCause,
    reason: str,
) -> RoutePlan:
    """A plan; aggregated without decode candidates."""
    return RoutePlan(
        placement=Placement.DISAGGREGATED if decode else Placement.AGGREGATED,
        prefill=tuple([_candidate(seat) for seat in prefill]),
        decode=tuple([_candidate(seat) for seat in decode]),
        cache_known=call.matches is not None,
        reason=reason,
        policy=call.policy.name,
        cause=cause,
    )


def _candidate(seat: _Seat) -> Candidate:
    info = seat.worker.info
    return Candidate(
        info.worker_id,
        info.incarnation,
        info.control_endpoint,
        seat.cached_tokens,
        seat.source,
        seat.fetch,
        seat.saved_tokens,
    )
