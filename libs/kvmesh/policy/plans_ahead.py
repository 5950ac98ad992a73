"""Route plans that a scheduler makes before their requests come, and a gateway's stock of them.

A gateway that is asked often tells the scheduler how many requests like the last one it expects
within `AHEAD_S`. The scheduler decides on those as if they had come, one after the other, and the
gateway uses each plan once. So the scheduler still decides on every request, and its view counts
every plan as load. Plans are as old as `AHEAD_S` at most and void as soon as a worker refuses.
Why: docs/adr/0012-plans-ahead.md. Tests: tests/unit/policy/test_plans_ahead.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvmesh.core.types import Placement, RoutePlan, RouteQuery
from kvmesh.core.values import quick

AHEAD_S = 0.2
"""A plan is used within this time, less than half the interval at which workers report loads."""

MAX_AHEAD = 256
"""Plans that a gateway has of a kind at a time. With 64, each fifth of many requests found none."""

BATCH = 8
"""Plans that a scheduler makes in one go; others wait meanwhile, less than 1 ms."""

REST_S = 0.05
"""Plans of one wish come on each other's heels: where none has come for so long, no more do. A
scheduler may make fewer than were wished for, an older one makes no more than 64.
"""

LOW_SHARE = 4
"""Who finds a part of the last plans that is no more than one in so many has the next ones made."""

MAX_KINDS = 64
"""Kinds of which a gateway remembers how often they come: those that came last."""


class PlanKind(NamedTuple):
    """Requests for which the same plan is as good.

    Attributes:
        num_tokens: longest prompt; the shortest has more than half of it.
        fingerprint: of the checkpoint; empty: any.
    """

    model: str
    scenario: str
    placement: Placement
    num_tokens: int
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class PlansAhead:
    """Plans for the next requests of a kind, each for one."""

    kind: PlanKind
    plans: tuple[RoutePlan, ...]


@quick
@dataclass(frozen=True, slots=True)
class Wish:
    """What a question says about plans beforehand.

    Attributes:
        count: wanted now.
        used: requests since the last question that took one.
        used_tokens: of their prompts.
    """

    kind: PlanKind
    count: int
    used: int = 0
    used_tokens: int = 0


def kind_of(query: RouteQuery, longest: int) -> PlanKind | None:
    """The kind of a query; None for one that needs a plan of its own.

    That is who was refused or lost, and everybody while others wait: the scheduler must hear of it.

    Args:
        longest: longest sequence that workers take.
    """
    if query.avoid or query.waiting:
        return None
    num_tokens = min((1 << query.num_tokens.bit_length()) - 1, longest)
    return PlanKind(query.model, query.scenario, query.placement, num_tokens, query.fingerprint)


@dataclass(slots=True)
class _Shelf:
    """One kind: what is there and on its way, until when, and when its last requests came.

    Attributes:
        used_until: plans that are on their way are of use until then.
        low: with so many or fewer it is time to ask for more.
    """

    plans: deque[tuple[float, RoutePlan]] = field(default_factory=deque)
    num_expected: int = 0
    expected_until: float = 0.0
    used_until: float = 0.0
    low: int = 0
    arrivals: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_AHEAD + 1))

    def is_expecting(self, now: float) -> bool:
        """Whether plans are on their way."""
        return self.num_expected > 0 and now < self.expected_until


class PlanStock:
    """A gateway's plans for requests that have not come yet.

    Args:
        most: plans wanted at a time; 0 wants none.
    """

    def __init__(self, most: int = MAX_AHEAD) -> None:
        self._most = min(most, MAX_AHEAD)
        self._shelves: dict[PlanKind, _Shelf] = {}
        self._used = 0
        self._used_tokens = 0

    def __len__(self) -> int:
        return sum(len(shelf.plans) for shelf in self._shelves.values())

    def is_low(self, kind: PlanKind, now: float) -> bool:
        """Whether few plans are left and no more are on their way."""
        shelf = self._shelves.get(kind)
        return (
            shelf is not None and 0 < len(shelf.plans) <= shelf.low and not shelf.is_expecting(now)
        )

    def take(
        self, kind: PlanKind, num_tokens: int, now: float, *, is_exchanged: bool = False
    ) -> RoutePlan | None:
        """A plan for a request that comes now; None if the scheduler has to be asked.

        Args:
            num_tokens: of its prompt.
            now: seconds on any clock that only goes forward.
            is_exchanged: the scheduler is asked about this request all the same, so it is not told
                of once more; its plan is for another one.
        """
        shelf = self._shelves.get(kind)
        if shelf is None:
            if len(self._shelves) >= MAX_KINDS:
                del self._shelves[min(self._shelves, key=self._last_came)]
            shelf = self._shelves[kind] = _Shelf()
        shelf.arrivals.append(now)
        plans = shelf.plans
        while plans and plans[0][0] <= now:
            plans.popleft()
        if not plans:
            return None
        if not is_exchanged:
            self._used += 1
            self._used_tokens += num_tokens
        return plans.popleft()[1]

    def wish(self, kind: PlanKind, now: float, *, is_exchanged: bool = False) -> Wish:
        """What to ask for together with the plan of a request.

        Args:
            is_exchanged: the request took a plan from here; its own is to be `put` here.
        """
        count = 0
        shelf = self._shelves.get(kind)
        if shelf is not None and not shelf.is_expecting(now):
            recent = sum(at > now - AHEAD_S for at in shelf.arrivals)
            # As many as before this one will come after it, and some of them find a plan here.
            count = max(min(recent - 1, self._most) - len(shelf.plans), 0)
            shelf.num_expected = count + is_exchanged
            shelf.expected_until = shelf.used_until = now + AHEAD_S
            shelf.low = (count + len(shelf.plans)) // LOW_SHARE
        used, self._used = self._used, 0
        tokens, self._used_tokens = self._used_tokens, 0
        return Wish(kind, count, used, tokens)

    def not_told(self, wish: Wish) -> None:
        """The scheduler did not hear of a wish: the next one tells what it told."""
        self._used += wish.used
        self._used_tokens += wish.used_tokens

    def _last_came(self, kind: PlanKind) -> float:
        return self._shelves[kind].arrivals[-1]

    def put(self, kind: PlanKind, plans: Iterable[RoutePlan], now: float) -> None:
        """Takes plans in; those that are not expected are dropped."""
        shelf = self._shelves.get(kind)
        if shelf is None or not shelf.is_expecting(now):
            return
        before = len(shelf.plans)
        # They were made after they were wished for, however long they were on their way.
        until = shelf.used_until
        shelf.plans.extend((until, plan) for plan in islice(plans, shelf.num_expected))
        shelf.num_expected -= len(shelf.plans) - before
        shelf.expected_until = min(until, now + REST_S)

    def clear(self) -> None:
        """Drops all plans, and those on their way: the fleet is other than they took it to be."""
        self._shelves.clear()
