"""Route plans: which workers to ask for a request, in which order, and why.

Pure: a function of (view, query, matches, now, rng). `seats.py` collects and sorts the workers,
`ranking.py` compares them. FlowKV Algorithm 1 (normal state) is the source of the default ranks.
Tests: tests/unit/policy/test_routing.py, test_routing_properties.py.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from operator import attrgetter

from kvmesh.core.details import FleetWorker
from kvmesh.core.fetch_reason import FetchReason
from kvmesh.core.types import (
    Candidate,
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
from kvmesh.policy.decode_link import by_transfer
from kvmesh.policy.fetch_route import Decoders, fetch_words, weigh_fetches
from kvmesh.policy.group_route import restrict_to_group
from kvmesh.policy.holders import NOTHING_LOWER
from kvmesh.policy.ranking import (
    CACHE_LOAD,
    HELP_SLOWDOWN,
    LEAST_CONNECTIONS,
    TRANSFER_SHARE,
    RoutePolicy,
)
from kvmesh.policy.reasons import decode_reason, no_pair, no_workers, prefill_reason, why_aggregated
from kvmesh.policy.seats import (
    Call,
    Group,
    LastResort,
    Seat,
    Sides,
    first_of,
    has_default_pair,
    in_order,
    of_layout,
    split_sides,
    take_seats,
)
from kvmesh.policy.token_pace import BEARABLE_MISSES, bears
from kvmesh.policy.view import FleetView, WorkerView


def _decoders(seats: list[Seat], policy: RoutePolicy) -> Decoders:
    able = [s for s in seats if s.worker.info.role is not Role.PREFILL and _is_in_favour(s)]
    return Decoders(able, policy.decode)


def plan_route(
    view: FleetView,
    query: RouteQuery,
    matches: Mapping[WorkerId, int] | None,
    now: float,
    rng: random.Random,
    policy: RoutePolicy = CACHE_LOAD,
    lenders: Sequence[WorkerView] = (),
) -> RoutePlan | Refusal:
    """Decides where to run a request.

    A disaggregated plan never has one worker on both sides, and all its workers have one layout.

    Args:
        matches: number of the query's leading blocks that each worker holds; None: not known.
        now: seconds on the clock of the view's `reported_at`.
        rng: breaks ties.
        lenders: workers outside the view that take no work, but from which prefixes may be fetched.

    Returns:
        A plan whose first candidates are the choice and the rest the fallbacks, or a refusal that
        names the workers that exist. Both carry the reason.
    """
    # Sorted, so that the order of the view does not matter.
    by_id = sorted(view.workers, key=_WORKER_ID)
    able = _able(by_id, query)
    if not able:
        return _nobody(query, by_id)
    call = Call(view, query, matches, now, rng, policy)
    seats = take_seats(call, able)
    all_hybrid = query.placement is Placement.AUTO and all(
        each.info.role is Role.HYBRID for each in able
    )
    if policy.fetches and matches:
        apart = query.placement is not Placement.AGGREGATED and not all_hybrid
        _weigh_fetches(call, seats, _lenders(call, lenders), apart=apart)
    if query.placement is Placement.AGGREGATED:
        return _plan_aggregated(call, seats, RouteCause.ASKED, "asked for")
    if all_hybrid:
        # No role demands two workers; only limits do.
        free = _free_of_limits(call, seats)
        return _plan_beside(call, seats, free) or _plan_aggregated(
            call, free, RouteCause.NO_PAIR, why_aggregated(able)
        )
    sides = split_sides(call, seats)
    if query.placement is Placement.DISAGGREGATED:
        return _plan_disaggregated(call, sides) or no_pair(query, able)
    if not has_default_pair(sides):
        return _plan_aggregated(call, seats, RouteCause.NO_PAIR, why_aggregated(able))
    plan = (
        _plan_short(call, sides.decode)
        or _plan_help(call, sides)
        or _plan_disaggregated(call, sides)
    )
    assert plan is not None, "a default pair exists, so a pair does"
    return plan


def _able(workers: Sequence[WorkerView], query: RouteQuery) -> list[WorkerView]:
    """Returns the workers that serve the model, accept work and fit all tokens of a request."""
    model, needed = query.model, query.num_tokens
    return [
        worker
        for worker in workers
        if (info := worker.info).model == model
        and not worker.load.draining
        and info.max_model_len >= needed
        and info.num_blocks * info.layout.block_size >= needed
    ]


def _lenders(call: Call, workers: Sequence[WorkerView]) -> list[Seat]:
    """Returns the seats of the lenders; their groups do not enter the plan."""
    if not workers:
        return []
    beside = dataclasses.replace(call, groups=set())
    awake = [each for each in workers if not each.load.draining]
    return take_seats(beside, [each for each in awake if each.info.model == call.query.model])


def _weigh_fetches(call: Call, seats: list[Seat], lenders: list[Seat], *, apart: bool) -> None:
    """Decides for each seat whether and from where it fetches a prefix.

    Args:
        lenders: further workers that may be read from.
        apart: whether prefill and decode may be on two workers, so that one may query the other.
    """
    pace = call.view.pace
    for layout in range(len(call.layouts)):
        members = of_layout(call, seats, layout)
        if not members:
            continue
        readable = (*members, *of_layout(call, lenders, layout))
        holders = [seat for seat in readable if not seat.silent]
        decoders = _decoders(members, call.policy) if apart and pace.ask_chunk_s else None
        weigh_fetches(members, holders, pace, call.rng, decoders)


def plan_without_scheduler(
    workers: tuple[FleetWorker, ...], query: RouteQuery, in_flight: Mapping[WorkerId, int]
) -> RoutePlan | Refusal:
    """Plans by least connections over the last known view, for a gateway without a scheduler.

    Args:
        workers: the last view; its loads are old, so only `draining` is read from them.
        in_flight: number of the caller's requests at each worker now.
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
    # Seeded by the request, so that gateways with equal views do not all take the same worker.
    rng = random.Random(query.request_id)
    view, _ = restrict_to_group(FleetView(views), query)
    return plan_route(view, query, None, 0.0, rng, LEAST_CONNECTIONS)


_WORKER_ID = attrgetter("info.worker_id")


def _longest_sequence(worker: WorkerView) -> int:
    info = worker.info
    return min(info.max_model_len, info.num_blocks * info.layout.block_size)


def _nobody(query: RouteQuery, by_id: list[WorkerView]) -> Refusal:
    """Returns the refusal that says why no worker takes the query."""
    served = [worker for worker in by_id if worker.info.model == query.model]
    awake = [worker for worker in served if not worker.load.draining]
    if not awake:
        return no_workers(query, served, by_id)
    return Refusal(
        RefusalReason.TOO_LONG,
        f"{query.num_tokens} tokens; the workers of {query.model} hold at most "
        f"{max(_longest_sequence(worker) for worker in awake)}",
    )


def _plan_disaggregated(call: Call, sides: Sides) -> RoutePlan | None:
    paired = sides.prefill
    if len(call.layouts) > 1:
        decode_layouts = {seat.layout for seat in sides.decode}
        paired = [seat for seat in paired if seat.layout in decode_layouts]
    if not paired or not sides.decode:
        return None
    # A worker that switched from decode may still have sequences that would miss their limits.
    paired = [seat for seat in paired if _can_be_borne(call, seat)] or paired

    # The best prefill worker with decode room in its group decides the group of the request.
    home = first_of(call, paired, call.policy.prefill, _crowded(call, sides.decode))
    layout, cluster = home.group

    def is_far(seat: Seat) -> bool:
        return seat.group[1] != cluster

    last_resort = is_far if len(call.groups) > 1 else None
    rest = [seat for seat in of_layout(call, paired, layout) if seat is not home]
    prefill = [home, *in_order(call, rest, call.policy.prefill, last_resort)]
    prefill = _worth_asking(call, prefill, home.group)
    beside = of_layout(call, sides.decode, layout)
    decode = in_order(call, beside, call.policy.decode, last_resort)
    first, least = prefill[0], decode[0]
    # A remote query counts on the decode worker that the rank chose.
    if call.view.links and call.policy.weighs_links and first.fetch is not FetchReason.ASK:
        decode = by_transfer(decode, first, call.view.links, call.policy.decode)
    reason = f"{prefill_reason(first)}{fetch_words(first)}; {decode_reason(decode[0])}"
    if decode[0] is not least:
        reason += ", over a faster link"
    return _plan(call, prefill, decode, _cause(call, first), reason)


def _cause(call: Call, first: Seat) -> RouteCause:
    if first.source is not None:
        return RouteCause.FETCH
    if call.policy.reads_cache and first.cached_tokens > 0:
        return RouteCause.PREFIX
    return call.policy.basis


def _crowded(call: Call, decode: list[Seat]) -> LastResort:
    """Returns the predicate of workers in groups without decode room; None if there is one
    group.
    """
    if len(call.groups) == 1:
        return None
    ready = {seat.group for seat in decode if not seat.decode_full and not seat.avoided}
    return lambda seat: seat.group not in ready


def _plan_short(call: Call, decode: list[Seat]) -> RoutePlan | None:
    """Plans the prompt on a decode worker with room for it, if few tokens are left to compute.

    That needs no transfer. A conversation's next turn is the common case: the worker that generated
    the last answer holds all but the new tokens. None: no worker fits.
    """
    most = call.policy.aggregate_tokens
    fitting = [
        seat
        for seat in decode
        if seat.uncached_tokens <= most
        and seat.takes_short_prompt
        and _can_be_borne(call, seat)
        and _is_in_favour(seat)
    ]
    if not fitting:
        return None
    ordered = in_order(call, fitting, call.policy.aggregated, None)
    reason = f"aggregated, a short prompt: {prefill_reason(ordered[0])}"
    return _plan(call, ordered, [], RouteCause.SHORT_PROMPT, reason)


def _free_of_limits(call: Call, hybrids: list[Seat]) -> list[Seat]:
    """Returns the hybrids on which the prompt causes no missed TPOT limit; all if none binds.

    With loose limits a worker tolerates prompts beside decode, so all are mixed workers. With tight
    ones decoding workers only decode, also those whose reports do not show it yet.
    """
    if call.policy.first_token is None or not call.policy.aggregate_tokens:
        return hybrids
    heard = [seat for seat in hybrids if not seat.silent]
    bearing = [seat for seat in heard if _can_be_borne(call, seat)]
    if len(bearing) == len(heard):
        return hybrids
    return [seat for seat in bearing if not seat.worker.decode_in_flight] or bearing or hybrids


def _plan_beside(call: Call, hybrids: list[Seat], free: list[Seat]) -> RoutePlan | None:
    """Plans the prompt on a free hybrid, and decode on one that decodes under limits already.

    So as few workers decode as the limits allow, and the others compute prompts. None: no limit
    binds, or a further worker has to decode.
    """
    if len(free) == len(hybrids):
        return None
    home = first_of(call, free, call.policy.prefill, None)
    decoding = [
        seat
        for seat in hybrids
        if seat not in free
        and seat.group == home.group
        and not seat.decode_full
        and _is_in_favour(seat)
        # Its pending prompts are computed before the KV arrives.
        and seat.first_token - seat.uncached_tokens <= home.first_token
    ]
    if not decoding:
        return None
    rest = [seat for seat in free if seat is not home and seat.group == home.group]
    prefill = [home, *in_order(call, rest, call.policy.prefill, None)]
    # The fullest first, so that workers become free again.
    decode = sorted(decoding, key=lambda seat: -seat.decode_share)
    held = f"{prefill_reason(home)}{fetch_words(home)}"
    reason = f"{held}; limits keep it from {decode_reason(decode[0])}"
    asked = _worth_asking(call, prefill, home.group)
    return _plan(call, asked, decode, _cause(call, home), reason)


def _plan_help(call: Call, sides: Sides) -> RoutePlan | None:
    """Plans the prompt on a decode worker whose first token comes before any prefill worker's."""
    cost = call.policy.first_token
    if cost is None or not call.policy.aggregate_tokens:
        return None
    sending = TRANSFER_SHARE * call.query.num_tokens
    # A worker that refused this request does not tell when its first token comes; others do.
    measures = [seat for seat in sides.prefill if _is_in_favour(seat)] or sides.prefill
    latest = sending + min(map(cost, measures))
    helpers = [
        seat
        for seat in sides.decode
        if cost(seat) * HELP_SLOWDOWN < latest
        and seat.may_help_prefill
        # Two prompts at once on the same cores: the second one is no sooner, and the first later.
        and not seat.beside_prompt
        and _can_be_borne(call, seat, _late_share(call, latest - cost(seat)))
        and _is_in_favour(seat)
        # A hybrid's cost may assume a remote query to the decode worker, which would be itself.
        and seat.fetch is not FetchReason.ASK
    ]
    if not helpers:
        return None
    best = min(helpers, key=cost)  # the first by name of several
    reason = f"aggregated, prefill workers are later: {prefill_reason(best)}{fetch_words(best)}"
    return _plan(call, [best], [], RouteCause.HELP, reason)


def _can_be_borne(call: Call, seat: Seat, gain: float = BEARABLE_MISSES) -> bool:
    """Whether the prompt makes fewer sequences miss a TPOT limit than it gains.

    The sequences that decode on the worker wait for this prompt and for those accepted before.

    Args:
        gain: expected number of TTFT limits that are kept because of this placement.
    """
    worker = seat.worker
    room = worker.load.room
    if room.strictest_s == room.spare_s == math.inf:
        return True  # no sequence there has a limit
    accepted = worker.pending_tokens + worker.prefill_in_flight * call.query.num_tokens
    prompts_s = (seat.uncached_tokens + accepted) * call.view.pace.token_s
    return bears(room, prompts_s, gain)


def _late_share(call: Call, saved_tokens: float) -> float:
    """Returns the expected number of TTFT limits kept by an earlier start, 0..1.

    It is the saved time as a fraction of the TTFT budget: the request, and those queued behind it,
    are in time more often by about this fraction.
    """
    budget_ms, token_s = call.query.ttft_budget_ms, call.view.pace.token_s
    if not budget_ms or not token_s:
        return BEARABLE_MISSES
    return min(saved_tokens * token_s * 1e3 / budget_ms, 1.0)


def _is_in_favour(seat: Seat) -> bool:
    """Whether the worker has neither refused nor fallen silent."""
    return not (seat.silent or seat.avoided)


def _worth_asking(call: Call, prefill: list[Seat], home: Group) -> list[Seat]:
    """Drops workers that are much later than the best one of the chosen group.

    Workers of other groups are not the measure, since those groups have no room to decode.
    """
    cost = call.policy.first_token
    if cost is None:
        return prefill
    costs = [
        cost(seat) for seat in prefill if seat.group == home and not (seat.silent or seat.avoided)
    ]
    latest = min(costs, default=math.inf) + call.policy.slack_tokens
    return [seat for seat in prefill if cost(seat) <= latest]


def _plan_aggregated(call: Call, seats: list[Seat], cause: RouteCause, why: str) -> RoutePlan:
    def is_dedicated(seat: Seat) -> bool:
        return seat.worker.info.role is not Role.HYBRID

    ordered = in_order(call, seats, call.policy.aggregated, is_dedicated)
    reason = f"aggregated, {why}: {prefill_reason(ordered[0])}{fetch_words(ordered[0])}"
    return _plan(call, ordered, [], cause, reason)


def _plan(
    call: Call,
    prefill: list[Seat],
    decode: list[Seat],
    cause: RouteCause,
    reason: str,
) -> RoutePlan:
    """Returns a plan; it is aggregated if there are no decode candidates."""
    return RoutePlan(
        placement=Placement.DISAGGREGATED if decode else Placement.AGGREGATED,
        prefill=tuple([_candidate(seat) for seat in prefill]),
        decode=tuple([_candidate(seat) for seat in decode]),
        cache_known=call.matches is not None,
        reason=reason,
        policy=call.policy.name,
        cause=cause,
    )


def _candidate(seat: Seat) -> Candidate:
    info, lower = seat.worker.info, seat.lower
    candidate = Candidate(
        info.worker_id,
        info.incarnation,
        info.control_endpoint,
        seat.cached_tokens,
        seat.source,
        seat.fetch,
        seat.saved_tokens,
    )
    if lower is NOTHING_LOWER:
        return candidate
    size = info.layout.block_size
    return dataclasses.replace(
        candidate,
        host_tokens=lower.host * size,
        disk_tokens=lower.disk * size,
        load_tokens=seat.load_tokens,
    )
