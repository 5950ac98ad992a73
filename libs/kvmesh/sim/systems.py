"""Whole systems to compare: compositions of policies, and how their workers admit.

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
    """A composition, and what it expects of workers and loads.

    Attributes:
        queue_offers: workers queue prompts instead of rejecting them.
        report_interval_s: age of the loads that routes see; 0 is at once.
        grouped: a cluster is the group of the scenario that it is named after.
        rejects_early: who would have its first token too late by what is known when it comes is
            refused at once.
    """

    queue_offers: bool = False
    report_interval_s: float = 0.0
    grouped: bool = False
    rejects_early: bool = False

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
"""Baselines whose workers have a queue, as in the systems that they stand for; Mooncake's brings
prefixes to workers without one."""


def _system(composition: Composition) -> System:
    fields = dataclasses.fields(composition)
    values = {field.name: getattr(composition, field.name) for field in fields}
    return System(**values, **_EXPECTS.get(composition.name, {}))


SYSTEMS: dict[str, System] = {name: _system(each) for name, each in COMPOSITIONS.items()}
"""The policies that a scheduler's config can name, in a fleet; P/D-Serve's has groups."""

SYSTEMS["pdserve"] = dataclasses.replace(SYSTEMS["pdserve"], grouped=True)
