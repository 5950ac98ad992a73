"""Requests that wait at the gateways, as their queries report. Bookkeeping without I/O or clock.

Tests: tests/unit/scheduler/test_demand.py.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.core.types import RequestId, RouteQuery
from kvmesh.policy.waiting import Demand, Looking

STALE_S = 0.75
"""Seconds after which a report is dropped.

A waiting request asks again within `policy.forwarding.REROUTE_AFTER_S` and a pause, so an older
report is outdated.
"""


class _Line(NamedTuple):
    """The requests that one report covers."""

    gateway: Hashable
    model: str
    scenario: str


@dataclass(frozen=True, slots=True)
class _Told:
    looking: Looking
    at: float


class DemandBoard:
    """Each gateway's latest report on each scenario, and the requests that asked recently."""

    def __init__(self) -> None:
        self._told: dict[_Line, _Told] = {}
        self._asked: dict[RequestId, float] = {}  # when each asked last
        self._num_new: dict[str, int] = {}

    def note_query(self, gateway: Hashable, query: RouteQuery, now: float) -> bool:
        """Adds a query. Returns False if its request was counted before.

        A request that met the workers that it avoids asked before, perhaps at another scheduler.

        Args:
            gateway: identity of the stream of the query.
        """
        line = _Line(gateway, query.model, query.scenario)
        # A part of what a gateway tells is never more than the whole, whatever it tells.
        reserved = min(query.waiting_reserved, query.waiting)
        remote = min(query.waiting_remote, reserved)
        self._told[line] = _Told(Looking(reserved, query.waiting - reserved, remote), now)
        is_known = query.request_id in self._asked
        self._asked[query.request_id] = now
        if is_known or query.avoid - query.unanswered:
            return False
        self._num_new[query.model] = self._num_new.get(query.model, 0) + 1
        return True

    def forget(self, gateway: Hashable) -> None:
        """Forgets a gateway that is gone."""
        self._told = {line: each for line, each in self._told.items() if line.gateway != gateway}

    def take_new(self, model: str) -> int:
        """Returns the number of requests that asked for the first time since the last call."""
        return self._num_new.pop(model, 0)

    def prune(self, served: Collection[str], now: float) -> None:
        """Drops outdated reports. Call it regularly, even without workers.

        Args:
            served: models that have workers. Requests for other models do not count in any rate.
        """
        since = now - STALE_S
        self._asked = {name: at for name, at in self._asked.items() if at > since}
        # Clients choose scenario names freely, so outdated reports must not stay.
        self._told = {line: each for line, each in self._told.items() if each.at > since}
        self._num_new = {model: n for model, n in self._num_new.items() if model in served}

    def current(self, model: str, now: float) -> Demand:
        """The requests of a model that wait now."""
        since = now - STALE_S
        found: dict[str, Looking] = {}
        for line, told in self._told.items():
            if line.model == model and told.at > since and told.looking != Looking():
                found[line.scenario] = found.get(line.scenario, Looking()) + told.looking
        return Demand(found)
