"""In which share of the time KV is on its way out of any of several workers, from totals that each
of them tells now and then.

A rate over a fixed time would miss what happens between reports; a total misses nothing.
Tests: tests/unit/policy/test_sending.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.types import WorkerId

Life = tuple[WorkerId, int]
"""A worker and its incarnation: totals begin anew with it."""


@dataclass(frozen=True, slots=True)
class SendingTotal:
    """What one worker told.

    Attributes:
        at_s: when; any clock that all of its reports go by.
        sending_s: time since its start with KV on its way.
    """

    at_s: float
    sending_s: float


class SendingMeter:
    """Measures the workers of one cluster."""

    def __init__(self) -> None:
        self._told: dict[Life, SendingTotal] = {}
        self._shares: dict[Life, float] = {}

    def observe(self, told: Mapping[Life, SendingTotal]) -> float:
        """Takes the last totals of those that are there, and says the share since the call before.

        It goes by the time between a worker's own reports: how many of them came within a cycle
        says nothing. Who told nothing new sends as before; who is new, or in another life, begins
        with nothing; who left is forgotten.

        Returns: 0..1, as if workers sent at moments of their own. Those that share a full link wait
            for each other and so send together more often than that: it is a little less, then.
        """
        shares = {}
        for life, total in told.items():
            before = self._told.get(life, total)
            span_s = total.at_s - before.at_s
            if span_s > 0:
                shares[life] = min((total.sending_s - before.sending_s) / span_s, 1.0)
            else:
                shares[life] = self._shares.get(life, 0.0)
        self._told, self._shares = dict(told), shares
        return 1.0 - math.prod(1.0 - share for share in shares.values())
