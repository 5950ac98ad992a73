"""Measures the fraction of time in which any worker of a cluster sends KV, from the workers'
totals.

Workers report totals, because a rate over a fixed time would miss what happens between reports.
Tests: tests/unit/policy/test_sending.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.types import WorkerId

Life = tuple[WorkerId, int]
"""A worker and its incarnation; its totals start at 0 with each incarnation."""


@dataclass(frozen=True, slots=True)
class SendingTotal:
    """One worker's report.

    Attributes:
        at_s: time of the report in seconds, on any one clock per worker.
        sending_s: seconds since its start in which it was sending KV.
    """

    at_s: float
    sending_s: float


class SendingMeter:
    """Measures the workers of one cluster."""

    def __init__(self) -> None:
        self._told: dict[Life, SendingTotal] = {}
        self._shares: dict[Life, float] = {}

    def observe(self, told: Mapping[Life, SendingTotal]) -> float:
        """Adds the latest totals of the present workers.

        Each worker's share is measured between its own reports, independent of their number in a
        cycle. A worker without a new report keeps its share. A new worker or incarnation starts
        with 0. A worker that left is dropped.

        Returns:
            Fraction of the time since the last call in which any worker sent, 0..1, as if workers
            sent independently. Workers on a full link wait for each other and send together more
            often, so the true value is then a little smaller.
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
