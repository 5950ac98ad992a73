"""What the requests of this gateway that wait for the same workers have in common.

Each group of workers has a lane of its own, so that no group's queue, estimate or pace is another
one's. Tests: tests/unit/gateway/request/test_lanes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.policy.crowd import Crowd, Lag
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.prefill_times import PrefillTimes
from services.gateway.request.turnstile import Turnstile

MAX_LANES = 256
"""Groups whose estimates are kept while nobody waits for them; each new checkpoint is another one.
"""


@dataclass(frozen=True, slots=True)
class Lane:
    """One group's queue, with what is learned while it moves."""

    turns: Turnstile = field(default_factory=Turnstile)
    crowd: Crowd = field(default_factory=Crowd)
    prefill_times: PrefillTimes = field(default_factory=PrefillTimes)


@dataclass(slots=True)
class Waiting:
    """Requests of one scenario that look for workers, as the scheduler is told.

    Attributes:
        count: all of them.
        paused: of these, those that found nobody and will ask again.
        paused_reserved: of those, the ones with a reservation; they wait for prefill.
        behind: of these, those that stand in the queue and have not asked yet.
    """

    count: int = 0
    paused: int = 0
    paused_reserved: int = 0
    behind: int = 0


class Lanes:
    """All lanes of a gateway.

    Attributes:
        lag: of the gateway's process, which all lanes share.
    """

    def __init__(self) -> None:
        self._lanes: dict[GroupKey, Lane] = {}
        self._waiting: dict[str, Waiting] = {}
        self.lag = Lag()

    @property
    def num_waiting(self) -> int:
        """Requests that look for workers now, of all groups."""
        return sum(lane.crowd.num_waiting for lane in self._lanes.values())

    @property
    def num_queued(self) -> int:
        """Requests that stand in a queue, of all groups."""
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
        """A request begins to look; what it is counted in until `leave`."""
        waiting = self._waiting.get(scenario)
        if waiting is None:
            waiting = self._waiting[scenario] = Waiting()
        waiting.count += 1
        return waiting

    def leave(self, scenario: str) -> None:
        """It looks no more. Clients name scenarios as they like, so none is kept unused."""
        waiting = self._waiting[scenario]
        waiting.count -= 1
        if not waiting.count:
            del self._waiting[scenario]

    def _forget_idle(self) -> None:
        busy = {key: lane for key, lane in self._lanes.items() if lane.crowd.num_waiting}
        self._lanes = busy
