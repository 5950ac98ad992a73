"""Complete systems to compare: compositions of policies, and the admission of their workers.

Tests: tests/unit/sim/test_systems.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvmesh.policy.composition import COMPOSITIONS, Composition, Offload

__all__ = ["SYSTEMS", "Offload", "System"]


@dataclass(frozen=True, slots=True)
class System(Composition):
    """A composition with its workers' admission and the age of their loads.

    Attributes:
        queue_offers: whether workers queue prompts instead of rejecting them.
        report_interval_s: seconds between two load reports; 0 is without delay.
        grouped: whether each cluster is the group of the scenario with its name.
        rejects_early: whether a request is refused at arrival if its predicted first token is too
            late.
        learns_deadlines: whether a search ends when the first token would come too late, by the
            times of earlier prompts, and a request is refused at arrival when so many wait that it
            would come too late, as gateways do; else a search ends at the deadline itself. A queue
            of a worker gives up likewise.
        by_connections: whether gateways offer to the worker with the fewest of their connections
            first. A connection lasts until the answer ends.
    """

    queue_offers: bool = False
    report_interval_s: float = 0.0
    grouped: bool = False
    rejects_early: bool = False
    learns_deadlines: bool = False
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
"""A system for each policy that a scheduler's config can name; P/D-Serve's has groups."""

SYSTEMS["pdserve"] = dataclasses.replace(SYSTEMS["pdserve"], grouped=True)
