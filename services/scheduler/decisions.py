"""The last decisions of a scheduler, for `GET /debug/decisions` on the admin port.

Tests: tests/unit/scheduler/test_decisions.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvmesh.core.clock import Clock
from kvmesh.core.errors import InvalidRequestError
from kvmesh.core.types import RequestId
from kvmesh.policy.explain import DecisionFacts

DEFAULT_LIMIT = 100

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Route:
    at_s: float
    request_id: RequestId
    describe: Callable[[], DecisionFacts]


class DecisionLog:
    """A ring of route decisions, and a ring of decisions about the fleet.

    New entries replace the oldest.

    Args:
        clock: stamps decisions.
        capacity: number of decisions of each kind that are kept; 0 keeps none.
    """

    def __init__(self, clock: Clock, capacity: int) -> None:
        self._clock = clock
        self._routes: deque[_Route] = deque(maxlen=capacity)
        self._fleet: deque[Json] = deque(maxlen=capacity)
        self._num_routes = 0

    def add(self, request_id: RequestId, describe: Callable[[], DecisionFacts]) -> None:
        """Adds a route decision.

        Args:
            describe: returns its facts; called when somebody asks for them.
        """
        self._num_routes += 1
        self._routes.append(_Route(self._clock.now(), request_id, describe))

    def add_fleet(self, kind: str, reason: str, **facts: Any) -> None:
        """Adds a decision about thresholds, roles or sizes."""
        at_s = self._clock.now()
        self._fleet.append({"at_s": at_s, "kind": kind, "reason": reason, **facts})

    def routes(self) -> Iterator[DecisionFacts]:
        """Route decisions, newest first."""
        return (route.describe() for route in reversed(self._routes))

    def _found(self, request_id: str) -> Iterator[_Route]:
        return (each for each in reversed(self._routes) if request_id in ("", each.request_id))

    def as_json(self, limit: int = DEFAULT_LIMIT, request_id: str = "") -> Json:
        """All decisions that are kept, newest first.

        Args:
            limit: maximum number of decisions of each kind.
        """
        now = self._clock.now()
        routes = [
            {"age_s": round(now - each.at_s, 3), **_plain(each.describe())}
            for each in islice(self._found(request_id), limit)
        ]
        fleet = [
            {"age_s": round(now - each["at_s"], 3), **_without_time(each)}
            for each in reversed(self._fleet)
        ]
        return {
            "num_routes": self._num_routes,
            "routes": routes,
            "fleet": fleet[:limit],
        }

    def shown(self, query: Mapping[str, str]) -> Json:
        """GET /debug/decisions?limit=N&request=ID.

        Raises:
            InvalidRequestError: the limit is not a number.
        """
        limit = query.get("limit", str(DEFAULT_LIMIT))
        if not (limit.isascii() and limit.isdigit()):
            raise InvalidRequestError(f"limit: {limit!r} is not a number of decisions", "limit")
        return self.as_json(int(limit), query.get("request", ""))


def _plain(facts: DecisionFacts) -> Json:
    return {name: _value(value) for name, value in dataclasses.asdict(facts).items()}


def _value(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _without_time(entry: Json) -> Json:
    return {name: value for name, value in entry.items() if name != "at_s"}
