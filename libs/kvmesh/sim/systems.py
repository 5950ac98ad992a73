"""Whole systems to compare: how each routes, admits, offloads and changes roles. Names in one dict.

Tests: tests/unit/sim/test_systems.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvmesh.policy.ranking import POLICIES, RoutePolicy
from kvmesh.sim.baselines import CACHE_AWARE, CACHE_CENTRIC, LEAST_QUEUE, PENDING_TOKENS


class Offload(enum.Enum):
    """Which prompts go to the offload cluster, where there is one."""

    ADAPTIVE = "above a threshold that follows link, queue and lengths"
    STATIC = "above the threshold that was best at the start"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class System:
    """A combination of policies.

    Attributes:
        queue_offers: workers queue prompts instead of rejecting them.
        report_interval_s: age of the loads that routes see; 0 is at once.
        switch_roles: idle workers help the other side (FlowKV).
        reallocate: workers change their role for good when the model says so (PrfaaS).
    """

    name: str
    route: RoutePolicy
    offload: Offload = Offload.ADAPTIVE
    queue_offers: bool = False
    report_interval_s: float = 0.0
    switch_roles: bool = False
    reallocate: bool = False

    @property
    def is_indexed(self) -> bool:
        """Whether `FleetIndex` orders workers as the route policy does."""
        is_fresh = self.report_interval_s == 0 and not self.queue_offers
        return is_fresh and self.route.name in {"cache_load", "least_loaded"}


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("kvmesh", POLICIES["cache_load"], switch_roles=True, reallocate=True),
        System("forwarding", POLICIES["least_loaded"], Offload.STATIC),
        System("prfaas", POLICIES["cache_load"], reallocate=True),
        System("flowkv", POLICIES["cache_load"], Offload.STATIC, switch_roles=True),
        System("cache_load", POLICIES["cache_load"], Offload.STATIC),
        System("round_robin", POLICIES["round_robin"], Offload.STATIC),
        System("local_queues", LEAST_QUEUE, Offload.STATIC, queue_offers=True),
        System(
            "pending_tokens",
            PENDING_TOKENS,
            Offload.STATIC,
            queue_offers=True,
            report_interval_s=0.1,
        ),
        System("cache_aware", CACHE_AWARE, Offload.STATIC, queue_offers=True),
        System("cache_centric", CACHE_CENTRIC, Offload.STATIC, queue_offers=True),
        System("all_remote", POLICIES["cache_load"], Offload.ALL),
        System("all_local", POLICIES["cache_load"], Offload.NONE),
    )
}
"""`kvmesh` is the composition; `forwarding`, `prfaas` and `flowkv` are one paper each; the rest are
baselines."""
