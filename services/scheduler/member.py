"""A member of the fleet: a worker's info, its last load, and what the scheduler decided on it.

Tests: tests/unit/scheduler/test_fleet.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvmesh.core.details import FleetWorker, WorkerDetail
from kvmesh.core.health import Health
from kvmesh.core.types import RequestId, Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.health import Verdict
from kvmesh.policy.view import WorkerView

RESTORED = 0
"""Session number of a member that was restored and has not registered yet."""


class Routed(NamedTuple):
    """The workers and the time of a request's last plan."""

    at: float
    prefill: WorkerId
    decode: WorkerId


class Taken(NamedTuple):
    """Ids of requests whose prompt a worker accepted, and for which it reserved blocks."""

    prompts: Sequence[RequestId] = ()
    reservations: Sequence[RequestId] = ()


NONE_TAKEN = Taken()


@dataclass(slots=True)
class Member:
    """A worker of the fleet.

    Attributes:
        session: number of its registration.
        closed: whether its group or its removal keeps requests away.
        hold: why it waits for connections to its peers, in words; empty: they are being checked;
            None: it does not wait.
        prefill_routes, decode_routes: times of plans that no report shows yet.
    """

    info: WorkerInfo
    load: WorkerLoad
    session: int
    reported_at: float
    expires_at: float
    came_at: int
    changed_at: int
    detail: WorkerDetail = WorkerDetail()
    reported: bool = False
    verdict: Verdict = Verdict()
    closed: bool = False
    hold: str | None = None
    prefill_routes: deque[float] = field(default_factory=deque)
    decode_routes: deque[float] = field(default_factory=deque)

    def forget_route(self, routed: Routed) -> bool:
        """Removes a plan.

        Returns False if it no longer counted: a report showed it, or the worker restarted.
        """
        own = self.info.worker_id
        counted = own == routed.prefill and _forget(self.prefill_routes, routed.at)
        return (own == routed.decode and _forget(self.decode_routes, routed.at)) or counted

    def forget_prompt(self, at: float) -> bool:
        """Removes a plan's prompt. Returns False if it no longer counted."""
        return _forget(self.prefill_routes, at)

    def forget_reservation(self, at: float) -> bool:
        """Removes a plan's reservation. Returns False if it no longer counted."""
        return _forget(self.decode_routes, at)

    def forget_routes_before(self, moment: float) -> None:
        """Removes plans that a report shows."""
        for routes in (self.prefill_routes, self.decode_routes):
            while routes and routes[0] <= moment:
                routes.popleft()


def _forget(routes: deque[float], at: float) -> bool:
    """Removes the plan of a time. Returns False if it no longer counted."""
    # Oldest first: a report has shown all older plans.
    if not routes or routes[0] > at or at not in routes:
        return False
    routes.remove(at)
    return True


class Standing(NamedTuple):
    """How a member stands in its group.

    Attributes:
        serves: whether it is not held back.
        session: number of its registration.
        is_out: whether it drains or is ejected, so that no route chooses it anyway.
    """

    info: WorkerInfo
    serves: bool
    session: int
    is_out: bool

    @property
    def is_here(self) -> bool:
        """Whether it has registered with this scheduler, and is not only remembered."""
        return self.session != RESTORED


def is_same_place(before: Member, info: WorkerInfo) -> bool:
    """Whether a registration leaves a worker's life and group as they were.

    A spare that takes a role is new in its group.
    """
    known = before.info
    is_same = known.incarnation == info.incarnation and known.role is not Role.SPARE
    return is_same and GroupKey.of(known) == GroupKey.of(info)


def worker_of(member: Member) -> FleetWorker:
    """A member as watchers see it."""
    verdict = member.verdict
    fault = "" if verdict.level is Health.OK else verdict.reason.value
    return FleetWorker(
        member.info,
        load_of(member),
        member.detail,
        member.reported,
        member.reported_at,
        verdict.level,
        fault or member.hold or "",
        connecting=member.hold is not None,
    )


def load_of(member: Member) -> WorkerLoad:
    """The load of a member. An ejected or closed worker or a spare counts as draining."""
    is_kept = member.info.role is Role.SPARE or member.closed or member.hold is not None
    takes_none = member.verdict.level >= Health.DEGRADED or is_kept
    if not takes_none or member.load.draining:
        return member.load
    return replace(member.load, draining=True)


def view_of(member: Member) -> WorkerView:
    """A member as route policies see it."""
    # A suspect is tried last, like a worker without recent reports.
    is_suspect = member.verdict.level is Health.SUSPECT
    return WorkerView(
        member.info,
        load_of(member),
        -math.inf if is_suspect else member.reported_at,
        prefill_in_flight=len(member.prefill_routes),
        decode_in_flight=len(member.decode_routes),
        pending_tokens=member.load.pending_tokens,
    )
