"""One queue per group of workers, with the estimates learned from it.

Requests that wait for the same group share a lane. Groups do not share one, so a slow group does
not distort the queue and the estimates of another. Tests: tests/unit/gateway/request/test_lanes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.policy.crowd import Crowd, Lag
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.prefill_times import PrefillTimes
from services.gateway.request.turnstile import Turnstile

MAX_LANES = 256
"""Number of lanes from which idle lanes are dropped. Each new checkpoint makes new groups."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One group's queue, its waiting requests by tenant, and its measured prefill times."""

    turns: Turnstile = field(default_factory=Turnstile)
    crowd: Crowd = field(default_factory=Crowd)
    prefill_times: PrefillTimes = field(default_factory=PrefillTimes)


@dataclass(slots=True)
class Waiting:
    """The requests of one scenario that look for workers.

    The gateway reports them to the scheduler.

    Attributes:
        count: all of them.
        paused: requests that no worker took and that will ask again.
        paused_reserved: paused requests that hold a reservation and wait for prefill.
        queued: requests that wait for their first turn to ask.
        planned: paused and queued requests that had a plan.
        remote: planned requests that wait for the remote cluster's prefill workers.
    """

    count: int = 0
    paused: int = 0
    paused_reserved: int = 0
    queued: int = 0
    planned: int = 0
    remote: int = 0


class Lanes:
    """All lanes of a gateway.

    Attributes:
        lag: event-loop lag of this process; all lanes share it.
    """

    def __init__(self) -> None:
        self._lanes: dict[GroupKey, Lane] = {}
        self._waiting: dict[str, Waiting] = {}
        self.lag = Lag()

    @property
    def num_waiting(self) -> int:
        """Number of requests of all groups that look for workers now."""
        return sum(lane.crowd.num_waiting for lane in self._lanes.values())

    @property
    def num_queued(self) -> int:
        """Number of requests of all groups that wait for their turn in a queue."""
        return sum(lane.turns.num_waiting for lane in self._lanes.values())

    def of(self, group: GroupKey) -> Lane:
        """The lane of one group."""
        lane = self._lanes.get(group)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                self._forget_idle()
            lane = self._lanes[group] = Lane()
        return lane

    def enter(self, scenario: str) -> Waiting:
        """Counts a request that starts to look for workers, until `leave`."""
        waiting = self._waiting.get(scenario)
        if waiting is None:
            waiting = self._waiting[scenario] = Waiting()
        waiting.count += 1
        return waiting

    def leave(self, scenario: str) -> None:
        """Ends the count. Clients choose scenario names freely, so unused names are dropped."""
        waiting = self._waiting[scenario]
        waiting.count -= 1
        if not waiting.count:
            del self._waiting[scenario]

    def _forget_idle(self) -> None:
        busy = {key: lane for key, lane in self._lanes.items() if lane.crowd.num_waiting}
        self._lanes = busy
