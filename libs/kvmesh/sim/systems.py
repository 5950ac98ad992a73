"""Complete systems to compare: compositions of policies, and the admission of their workers.

Tests: tests/unit/sim/test_systems.py.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from kvmesh.policy.composition import COMPOSITIONS, Composition, Offload

__all__ = ["SYSTEMS", "Deadlines", "Offload", "System"]


class Deadlines(enum.Enum):
    """When a request is given up that waits at a gateway, or in a worker's queue."""

    TIMEOUT = "when its limit on the time to first token (TTFT) has passed"
    EARLY_ABORT = "as soon as its first token would be late, by the times of earlier prompts"
    ADMISSION = "as early, and at arrival if too many wait before it: the rule of live gateways"


@dataclass(frozen=True, slots=True)
class System(Composition):
    """A composition with its workers' admission and the age of their loads.

    Attributes:
        queue_offers: whether workers queue prompts instead of rejecting them.
        report_interval_s: seconds between two load reports; 0 is without delay.
        grouped: whether each cluster is the group of the scenario with its name.
        rejects_early: whether a request is refused at arrival if its predicted first token is too
            late.
        deadlines: when a request is given up that waits for its prompt to begin.
        by_connections: whether gateways offer to the worker with the fewest of their connections
            first. A connection lasts until the answer ends.
    """

    queue_offers: bool = False
    report_interval_s: float = 0.0
    grouped: bool = False
    rejects_early: bool = False
    deadlines: Deadlines = Deadlines.ADMISSION
    by_connections: bool = False

    @property
    def is_indexed(self) -> bool:
        """Whether `FleetIndex` orders workers as the route policy does."""
        is_fresh = self.report_interval_s == 0 and not self.queue_offers
        return is_fresh and self.orders_by_load


_EXPECTS: dict[str, dict[str, Any]] = {
    "local_queues": {"queue_offers": True},
    "pending_tokens": {"queue_offers": True, "report_interval_s": 0.1},
    "cache_aware": {"queue_offers": True},
    "cache_centric": {"rejects_early": True},
}
"""Settings of the baselines. Workers have a queue where those of the original system do. Mooncake's
(`cache_centric`) have none and reject early."""


def _system(composition: Composition) -> System:
    fields = dataclasses.fields(composition)
    values = {field.name: getattr(composition, field.name) for field in fields}
    return System(**values, **_EXPECTS.get(composition.name, {}))


SYSTEMS: dict[str, System] = {name: _system(each) for name, each in COMPOSITIONS.items()}
"""A system for each policy that a scheduler's config can name; P/D-Serve's has groups. Two more,
`pdserve_baseline` and `pdserve_forwarding`, are for simulations only."""

SYSTEMS["pdserve"] = dataclasses.replace(SYSTEMS["pdserve"], grouped=True)

SYSTEMS["pdserve_baseline"] = dataclasses.replace(
    SYSTEMS["local_queues"],
    name="pdserve_baseline",
    by_connections=True,
    deadlines=Deadlines.TIMEOUT,
)
"""The baseline of P/D-Serve's evaluation (section 4), its own first version with separate prefill
and decode. Prefill workers have queues, a request goes to the worker with the fewest connections,
and timeouts are checked before a prompt begins, not during it (3.5). The paper may also end a
request whose first token is late; here such an answer is generated and counts as late.
"""

SYSTEMS["pdserve_forwarding"] = dataclasses.replace(
    SYSTEMS["forwarding"], name="pdserve_forwarding", deadlines=Deadlines.EARLY_ABORT
)
"""P/D-Serve's forwarding to idle workers with its early intervention (3.5): a request ends when it
has waited too long for its length. Every request waits; none is refused at arrival."""
