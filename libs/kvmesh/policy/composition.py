"""Complete policies by name, each a combination of the papers' decisions. The scheduler and the
simulator both use them.

The default, `kvmesh`, combines all four papers. For each request:
- P/D-Serve 3.2 chooses the group, where workers have a scenario (`group_route.py`).
- PrfaaS 3.3 chooses the cluster (`offload_route.py`).
- A short prompt goes to its decode worker. Any other goes to the prefill worker with the least
  expected work and the decode worker with the most room (FlowKV Algorithm 1, `routing.py`).
- Workers fetch cached prefixes from others (PrfaaS 3.3, TokenLake 4.3, `fetch_route.py`), and idle
  prefill workers compute a long prompt together (TokenLake 6.2, `chain.py`).
- P/D-Serve 3.5 offers the request to the workers in that order (`forwarding.py`).

Each second PrfaaS 3.4.3 moves the threshold and FlowKV Algorithm 1 switches roles. Every few
minutes PrfaaS 3.4.3 reallocates workers (`allocation_loop.py`).
Tests: tests/unit/policy/test_composition.py.
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
from kvmesh.policy.late import late_refusal
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
    """Which prompts go to the offload cluster, if there is one (PrfaaS 3.3)."""

    ADAPTIVE = "above a threshold that follows link, queue and lengths"
    STATIC = "above the threshold that was best at the start"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Composition:
    """A combination of policies.

    Attributes:
        route: ranks the workers for each request.
        offload: which prompts go to the offload cluster.
        switch_roles: whether idle workers help the other side for a while (FlowKV Algorithm 1).
        reallocate: whether workers change their role for good when the throughput model says so
            (PrfaaS 3.4.3).
        monitor: whether they do when the measured latencies say so (P/D-Serve 3.3).
        joint: rule that divides requests that arrive at the same time; None: each is decided alone.
        joint_window_s: seconds that a request waits for others where its prompt would wait anyway.
        chains: whether idle prefill workers compute long prompts together.
        refuses_late: whether a prompt that would miss its TTFT limit gives way to others.
        knows_tpot: whether requests' TPOT limits are kept. Only simulations read it, so that the
            baselines ignore the limits.
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
    refuses_late: bool = False
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
            DEFAULT,
            KVMESH,
            switch_roles=True,
            reallocate=True,
            chains=True,
            refuses_late=True,
            knows_tpot=True,
        ),
        Composition(
            "joint", KVMESH, switch_roles=True, reallocate=True, joint=JointRule.FIRST_TOKEN
        ),
        Composition(
            "tokenlake",
            KVMESH,
            switch_roles=True,
            reallocate=True,
            joint=JointRule.VOLUME,
            chains=True,
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
"""All policies by name. `joint` and `tokenlake` are variants of `kvmesh` with joint decisions.
`forwarding` (P/D-Serve 3.5), `pdserve`, `prfaas` and `flowkv` are one paper each; the others below
them are baselines."""

_OFFLOAD_CAUSES = {
    OffloadReason.LONG: RouteCause.LONG_PROMPT,
    OffloadReason.REMOTE_DOWN: RouteCause.REMOTE_DOWN,
    OffloadReason.LOCAL_DOWN: RouteCause.LOCAL_DOWN,
}


def request_rng(request_id: RequestId) -> random.Random:
    """Returns the random generator that breaks a request's ties.

    Its seed is the request's id: ties of one request fall the same way wherever and whenever it is
    decided, those of different requests differently.
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
    """Decides where to run a request; the scheduler and the simulator share this decision.

    Args:
        matches: number of the query's leading blocks that each worker holds; None: not known.
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
    choice = planned.choice
    if choice is not None and choice.reason in _OFFLOAD_CAUSES:
        cause = _OFFLOAD_CAUSES[choice.reason]
        route = dataclasses.replace(route, cause=cause, remote=choice.remote)
    if policy.chains:
        route = with_chain(route, members, query, matches, now)
    if policy.refuses_late and (refusal := late_refusal(route, members, query)) is not None:
        return dataclasses.replace(planned, route=refusal)
    return planned if route is planned.route else dataclasses.replace(planned, route=route)
