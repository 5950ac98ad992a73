"""Seats: the workers that could take a request, each with its standing in this one decision.

This module finds what each worker holds, sorts the workers, and gives each hybrid a side. Plans are
made of them in `routing.py`. Pure.
Tests: tests/unit/policy/test_routing.py, test_routing_properties.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvmesh.core.types import KvLayout, Role, RouteCause, RouteQuery, WorkerId
from kvmesh.policy.holders import held_by, lower_of
from kvmesh.policy.ranking import SHARED_SLOWDOWN, Rank, RankFunction, RoutePolicy, Standing
from kvmesh.policy.view import FleetView, WorkerView

SILENT_AFTER_S = 1.5
"""Seconds without a report (three intervals) after which a worker is tried after the others."""

Group = tuple[int, str]
"""Workers of equal layout (by number) in one cluster: KV moves freely among them."""

LastResort = Callable[["Seat"], bool] | None
"""Predicate of the workers that are tried after all others; None: there are none."""


@dataclass(slots=True)
class Call:
    """The arguments of one decision, and the layouts and groups of its workers."""

    view: FleetView
    query: RouteQuery
    matches: Mapping[WorkerId, int] | None
    now: float
    rng: random.Random
    policy: RoutePolicy
    layouts: list[KvLayout] = field(default_factory=list)
    groups: set[Group] = field(default_factory=set)


class Seat(Standing):
    """A worker's standing in one decision.

    Attributes:
        avoided: whether the worker refused or failed this request before.
        silent: whether its last report is older than `SILENT_AFTER_S`.
        layout: number of its KV layout in `Call.layouts`; hashing layouts would be slow.
        group: its layout number and cluster.
        beside_prompt: whether another worker computes a prompt on the same cores.
    """

    __slots__ = ("avoided", "beside_prompt", "group", "layout", "silent")

    avoided: bool
    silent: bool
    layout: int
    group: Group
    beside_prompt: bool


def take_seats(call: Call, able: list[WorkerView]) -> list[Seat]:
    """Returns the seats of all workers. One loop, because a route spends most of its time here."""
    query, layouts = call.query, call.layouts
    num_tokens, avoid = query.num_tokens, query.avoid
    heard_since = call.now - SILENT_AFTER_S
    names = [worker.info.worker_id for worker in able]
    held = held_by(call.matches, names)
    reads = call.view.reads
    seats: list[Seat] = []
    shares_cores = False
    group: Group = (-1, "")
    known: KvLayout | None = None
    number = 0
    for worker, name, blocks in zip(able, names, held, strict=True):
        info = worker.info
        layout = info.layout
        cached = min(blocks * layout.block_size, num_tokens) if blocks else 0
        seat = Seat(worker, query, cached, 0)
        if blocks:
            seat.reads = reads.get(name, 0.0)
        seat.avoided = name in avoid
        seat.silent = worker.reported_at < heard_since
        if layout is not known:
            known, number = layout, _layout_number(layouts, layout)
        seat.layout = number
        if group[0] != number or group[1] != info.cluster:
            group = (number, info.cluster)
            call.groups.add(group)
        seat.group = group
        seat.beside_prompt = False
        if info.shared_cores:
            shares_cores = True
        seats.append(seat)
    lower = lower_of(call.matches, names)
    for seat, below in zip(seats, lower or (), strict=lower is not None):
        seat.lower = below
    if shares_cores:
        _divide_cores(seats)
    return seats


def _divide_cores(seats: list[Seat]) -> None:
    """Lets prompts take longer on workers while others compute on the same cores."""
    sharing = [seat for seat in seats if seat.worker.info.shared_cores]
    computing = Counter(seat.worker.info.shared_cores for seat in sharing if seat.worker.computes)
    prompts = Counter(seat.worker.info.shared_cores for seat in sharing if seat.worker.prefill_used)
    for seat in sharing:
        worker = seat.worker
        cores = worker.info.shared_cores
        seat.first_token *= 1 + SHARED_SLOWDOWN * (computing[cores] - worker.computes)
        seat.beside_prompt = prompts[cores] > (worker.prefill_used > 0)


def of_layout(call: Call, seats: list[Seat], layout: int) -> list[Seat]:
    """Returns the seats with one KV layout."""
    if len(call.layouts) == 1:
        return seats
    return [seat for seat in seats if seat.layout == layout]


def _layout_number(known: list[KvLayout], layout: KvLayout) -> int:
    for number, each in enumerate(known):
        if each is layout or each == layout:
            return number
    known.append(layout)
    return len(known) - 1


@dataclass(frozen=True, slots=True)
class Sides:
    """Workers that may prefill and workers that may decode, sorted by name; none is in both."""

    prefill: list[Seat]
    decode: list[Seat]


def in_order(
    call: Call, seats: list[Seat], rank: RankFunction, last_resort: LastResort
) -> list[Seat]:
    """Returns all workers in the order in which they are tried."""
    keyed = _keyed(call, seats, rank, last_resort)
    keyed.sort()
    return [seats[key[5]] for key in keyed]


def first_of(call: Call, seats: list[Seat], rank: RankFunction, last_resort: LastResort) -> Seat:
    """Returns the worker that is tried first."""
    return seats[min(_keyed(call, seats, rank, last_resort))[5]]


def _keyed(
    call: Call, seats: list[Seat], rank: RankFunction, last_resort: LastResort
) -> list[tuple[bool, bool, bool, Rank, float, int]]:
    """Returns one sort key per worker; its last number is the worker's index in `seats`."""
    if call.policy.basis is RouteCause.ROTATION:
        for index, seat in enumerate(seats):
            seat.turn = (index - call.view.num_routes) % len(seats)
    if call.policy.is_uneven is not None and call.policy.is_uneven(seats):
        for seat in seats:
            seat.uneven = True
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


def split_sides(call: Call, seats: list[Seat]) -> Sides:
    """Gives each hybrid worker the side that its group needs more for this request."""
    whole = Sides(
        [seat for seat in seats if seat.worker.info.role is Role.PREFILL],
        [seat for seat in seats if seat.worker.info.role is Role.DECODE],
    )
    if len(whole.prefill) + len(whole.decode) == len(seats):
        return whole
    for group in dict.fromkeys(seat.group for seat in seats):
        members = [seat for seat in seats if seat.group == group]
        hybrids = [seat for seat in members if seat.worker.info.role is Role.HYBRID]
        sides = Sides(
            [seat for seat in members if seat.worker.info.role is Role.PREFILL],
            [seat for seat in members if seat.worker.info.role is Role.DECODE],
        )
        for seat in in_order(call, hybrids, call.policy.prefill, None):
            side = _needier_side(sides)
            side.append(seat)
            (whole.prefill if side is sides.prefill else whole.decode).append(seat)
    # Sorted by name again, so that a rotation does not depend on loads.
    for side in (whole.prefill, whole.decode):
        side.sort(key=lambda seat: seat.worker.info.worker_id)
    return whole


def _needier_side(sides: Sides) -> list[Seat]:
    if not sides.prefill or not sides.decode:
        return sides.decode if sides.prefill else sides.prefill
    ready_prefill = sum(not seat.prefill_busy for seat in sides.prefill)
    ready_decode = sum(not seat.decode_full for seat in sides.decode)
    return sides.prefill if ready_prefill < ready_decode else sides.decode


def has_default_pair(sides: Sides) -> bool:
    """Whether a group has both sides, and in it a worker that is not hybrid."""
    if not sides.prefill or not sides.decode:
        return False
    groups = {seat.group for seat in sides.prefill}
    groups &= {seat.group for seat in sides.decode}
    for seat in (*sides.prefill, *sides.decode):
        if seat.worker.info.role is not Role.HYBRID and seat.group in groups:
            return True
    return False
