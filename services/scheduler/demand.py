"""What waits at the gateways, as their queries tell. Plain bookkeeping without I/O or clock.

Tests: tests/unit/scheduler/test_demand.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.core.types import RequestId, RouteQuery

STALE_S = 0.75
"""A request that waits asks again within `policy.forwarding.REROUTE_AFTER_S` and a pause; what was
told longer ago is over."""


class _Line(NamedTuple):
    """Whose waiting requests are told together."""

    gateway: Hashable
    model: str
    scenario: str


@dataclass(frozen=True, slots=True)
class _Told:
    waiting: int
    reserved: int
    at: float


@dataclass(frozen=True, slots=True)
class Looking:
    """Requests that look for workers.

    Attributes:
        reserved: with a reservation; they wait for prefill.
        unreserved: without one.
    """

    reserved: int = 0
    unreserved: int = 0


@dataclass(slots=True)
class _Asked:
    model: str
    remote: bool
    times: int
    at: float


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests of one model that look for workers.

    Attributes:
        scenarios: by the scenario that they name.
        remote, local: wait for prefill in that cluster. Requests that asked again after no worker
            took them tell how the rest are divided; most of a crowd wait for their turn to ask.
    """

    scenarios: Mapping[str, Looking] = field(default_factory=dict)
    remote: float = 0.0
    local: float = 0.0

    @property
    def reserved(self) -> int:
        """All that have a reservation."""
        return sum(each.reserved for each in self.scenarios.values())

    @property
    def unreserved(self) -> int:
        """All that have none."""
        return sum(each.unreserved for each in self.scenarios.values())


class DemandBoard:
    """The last word of every gateway on each scenario, and who asked more than once."""

    def __init__(self) -> None:
        self._told: dict[_Line, _Told] = {}
        self._asked: dict[RequestId, _Asked] = {}
        self._num_new: dict[str, int] = {}

    def note_query(self, gateway: Hashable, query: RouteQuery, now: float) -> bool:
        """Takes a query in; False if the request was counted before.

        Who has workers to avoid was: it asked then, perhaps another scheduler.

        Args:
            gateway: identity of the stream that it came over.
        """
        line = _Line(gateway, query.model, query.scenario)
        self._told[line] = _Told(query.waiting, query.waiting_reserved, now)
        asked = self._asked.get(query.request_id)
        if asked is not None:
            asked.times += 1
            asked.at = now
            return False
        was_refused = bool(query.avoid - query.lost)
        self._asked[query.request_id] = _Asked(query.model, False, 1 + was_refused, now)
        if query.avoid:
            return False
        self._num_new[query.model] = self._num_new.get(query.model, 0) + 1
        return True

    def note_cluster(self, request_id: RequestId, remote: bool) -> None:
        """Notes which cluster was chosen to prefill a request."""
        self._asked[request_id].remote = remote

    def forget(self, gateway: Hashable) -> None:
        """A gateway is gone."""
        self._told = {line: each for line, each in self._told.items() if line.gateway != gateway}

    def take_new(self, model: str) -> int:
        """Requests that asked for the first time since the last call."""
        return self._num_new.pop(model, 0)

    def prune(self, served: Collection[str], now: float) -> None:
        """Drops what is over; to be called now and then, whether anybody is served or not.

        Args:
            served: models that have workers. What came for others is not part of any rate.
        """
        since = now - STALE_S
        self._asked = {k: each for k, each in self._asked.items() if each.at > since}
        # Clients name scenarios as they like: what was told of one is not kept for ever.
        self._told = {line: each for line, each in self._told.items() if each.at > since}
        self._num_new = {model: n for model, n in self._num_new.items() if model in served}

    def current(self, model: str, now: float) -> Demand:
        """What waits now."""
        since = now - STALE_S
        waiting: Counter[str] = Counter()
        holding: Counter[str] = Counter()
        for line, told in self._told.items():
            if line.model == model and told.at > since:
                waiting[line.scenario] += told.waiting
                holding[line.scenario] += told.reserved
        asked = [e for e in self._asked.values() if e.model == model and e.at > since]
        again = [each for each in asked if each.times > 1]
        reserved = holding.total()
        remote = sum(each.remote for each in again)
        crowd = max(reserved / len(again), 1.0) if again else 0.0
        scenarios = {
            scenario: Looking(holding[scenario], count - holding[scenario])
            for scenario, count in waiting.items()
            if count
        }
        return Demand(scenarios, remote * crowd, (len(again) - remote) * crowd)
