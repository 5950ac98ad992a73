"""Whole policies by name: which paper decides what, for the scheduler and the simulator alike.

`kvmesh` is the composition. Per request: P/D-Serve chooses the group, where workers have a scenario
(`group_route.py`), PrfaaS chooses the cluster (`offload_route.py`), then a
short prompt stays with its decode worker, else the prefill worker with the least expected work and
the decode worker with the most room are taken (`routing.py`), idle prefill workers compute a long
prompt together (`chain.py`), and P/D-Serve's forwarding offers it
to them in that order. Each second: PrfaaS moves the threshold, FlowKV switches roles. Each few
minutes: PrfaaS reallocates (`allocation_loop.py`). Tests: tests/unit/policy/test_composition.py.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.types import RequestId, RouteCause, RoutePlan, RouteQuery, WorkerId
from kvmesh.policy.baselines import CACHE_AWARE, CACHE_CENTRIC, LEAST_QUEUE, PENDING_TOKENS
from kvmesh.policy.chain import with_chain
from kvmesh.policy.group_route import restrict_to_group
from kvmesh.policy.joint_choice import JOINT_WINDOW_S, JointRule
from kvmesh.policy.offload import OffloadReason, OffloadState
from kvmesh.policy.offload_route import OffloadPlan, plan_offload
from kvmesh.policy.ranking import (
    CACHE_LOAD,
    KVMESH,
    LEAST_LOADED,
    PDSERVE,
    ROUND_ROBIN,
    RoutePolicy,
)
from kvmesh.policy.view import FleetView

DEFAULT = "kvmesh"


class Offload(enum.Enum):
    """Which prompts go to the offload cluster, where there is one."""

    ADAPTIVE = "above a threshold that follows link, queue and lengths"
    STATIC = "above the threshold that was best at the start"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Composition:
    """A combination of policies.

    Attributes:
        switch_roles: idle workers help the other side (FlowKV).
        reallocate: workers change their role for good when the model says so (PrfaaS).
        monitor: they do when the latencies say so (P/D-Serve 3.3).
        joint: what requests that ask at the same time are divided by; None: they are decided on
            one by one.
        joint_window_s: how long a request waits for others where its prompt would wait anyway.
        chains: idle prefill workers compute long prompts together.
        knows_tpot: limits on the time per token are kept, where requests have them; in simulations,
            for the baselines' sake.
    """

    name: str
    route: RoutePolicy
    offload: Offload = Offload.ADAPTIVE
    switch_roles: bool = False
    reallocate: bool = False
    monitor: bool = False
    joint: JointRule | None = None
    joint_window_s: float = JOINT_WINDOW_S
    chains: bool = False
    knows_tpot: bool = False

    @property
    def orders_by_load(self) -> bool:
        """Whether `FleetIndex` orders workers as the route policy does."""
        ordered = (KVMESH, CACHE_LOAD, LEAST_LOADED, PDSERVE)
        return self.route.name in {each.name for each in ordered}


COMPOSITIONS: dict[str, Composition] = {
    each.name: each
    for each in (
        Composition(
            DEFAULT, KVMESH, switch_roles=True, reallocate=True, chains=True, knows_tpot=True
        ),
        Composition(
            "joint", KVMESH, switch_roles=True, reallocate=True, joint=JointRule.FIRST_TOKEN
        ),
        Composition(
            "tokenlake", KVMESH, switch_roles=True, reallocate=True, joint=JointRule.VOLUME
        ),
        Composition("forwarding", LEAST_LOADED, Offload.STATIC),
        Composition("pdserve", PDSERVE, Offload.STATIC, monitor=True),
        Composition("prfaas", CACHE_LOAD, reallocate=True),
        Composition("flowkv", CACHE_LOAD, Offload.STATIC, switch_roles=True),
        Composition("cache_load", CACHE_LOAD, Offload.STATIC),
        Composition("least_loaded", LEAST_LOADED, Offload.STATIC),
        Composition("round_robin", ROUND_ROBIN, Offload.STATIC),
        Composition("local_queues", LEAST_QUEUE, Offload.STATIC),
        Composition("pending_tokens", PENDING_TOKENS, Offload.STATIC),
        Composition("cache_aware", CACHE_AWARE, Offload.STATIC),
        Composition("cache_centric", CACHE_CENTRIC, Offload.STATIC),
        Composition("all_remote", CACHE_LOAD, Offload.ALL),
        Composition("all_local", CACHE_LOAD, Offload.NONE),
    )
}
"""`forwarding`, `pdserve`, `prfaas` and `flowkv` are one paper each; the others below them are
baselines."""

_OFFLOAD_CAUSES = {
    OffloadReason.LONG: RouteCause.LONG_PROMPT,
    OffloadReason.REMOTE_DOWN: RouteCause.REMOTE_DOWN,
    OffloadReason.LOCAL_DOWN: RouteCause.LOCAL_DOWN,
}


def request_rng(request_id: RequestId) -> random.Random:
    """Ties of one request fall the same way wherever and whenever it is decided; those of different
    requests fall differently.
    """
    return random.Random(request_id)


def decide_route(
    policy: Composition,
    view: FleetView,
    query: RouteQuery,
    matches: Mapping[WorkerId, int] | None,
    now: float,
    offload: OffloadState,
) -> OffloadPlan:
    """Where to run a request: the one decision that scheduler and simulator share.

    Args:
        matches: leading blocks of the query that each worker holds; None when nobody knows.
        now: seconds on the clock of the view's `reported_at`.

    Returns:
        A plan or a refusal, and the choices of group and cluster if there were any.
    """
    members, group = restrict_to_group(view, query, offload.remote)
    planned = plan_offload(
        members,
        query,
        matches,
        now,
        request_rng(query.request_id),
        policy.route,
        offload,
    )
    if group is not None:
        planned = dataclasses.replace(planned, group=group)
    if not isinstance(planned.route, RoutePlan):
        return planned
    route = planned.route
    cause = None if planned.choice is None else _OFFLOAD_CAUSES.get(planned.choice.reason)
    if cause is not None:
        route = dataclasses.replace(route, cause=cause)
    if policy.chains:
        route = with_chain(route, members, query, now)
    return planned if route is planned.route else dataclasses.replace(planned, route=route)
