"""Workers of a remote cluster that send over one link, and a scheduler that is told of it as live
workers tell: totals now and then, pieces counted when they have arrived.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

from kvmesh.core.busy_time import BusyTime
from kvmesh.core.types import Role
from kvmesh.policy.offload import AdjustReason
from kvmesh.sim.events import EventQueue
from kvmesh.sim.link import SharedLink
from services.scheduler.config import PlanningConfig
from services.scheduler.role_orders import RoleChanges
from tests.unit.policy.fleet_examples import worker_info
from tests.unit.scheduler.test_planner import IDLE, Mesh

BASE_TOKENS = 1000
REPORT_S = 0.52
"""The usual interval and the least gap after it."""

NUM_PIECES = 4
TRANSFER_BYTES = 50e6


@dataclass(frozen=True, slots=True)
class Senders:
    """What the workers do.

    Attributes:
        pause_s: mean time between two transfers of one worker.
        own_mb_s: each sends so fast and no faster, whatever the link carries; 0: as fast as that.
        lost_share: of their reports.
    """

    pause_s: float
    count: int = 2
    own_mb_s: float = 0.0
    lost_share: float = 0.0


class Sender:
    """One transfer after another, in pieces, with pauses of random length between."""

    def __init__(
        self, events: EventQueue, link: SharedLink, pause_s: float, draw: random.Random
    ) -> None:
        self.sent = self.waiting = 0.0
        self.sending = BusyTime()
        self.is_alive = True
        self._events, self._link, self._draw = events, link, draw
        self._pause_s = pause_s
        self._rest()

    def _rest(self) -> None:
        self._events.after(self._draw.expovariate(1 / self._pause_s), self._begin)

    def _begin(self) -> None:
        if self.is_alive:
            self.waiting = TRANSFER_BYTES
            self.sending.begin(self._events.now())
            self._send(NUM_PIECES)

    def _send(self, num_left: int) -> None:
        self._link.send(TRANSFER_BYTES / NUM_PIECES, partial(self._arrived, num_left - 1))

    def _arrived(self, num_left: int) -> None:
        self.sent += TRANSFER_BYTES / NUM_PIECES
        self.waiting -= TRANSFER_BYTES / NUM_PIECES
        if num_left and self.is_alive:
            self._send(num_left)
            return
        self.sending.end(self._events.now())
        self._rest()


class FarLink:
    """A scheduler that looks once a second.

    Args:
        configured_mb_s: what it believes of the link.
        carried_mb_s: what the link carries.

    Attributes:
        reasons: why the threshold is where it is, after each cycle.
        tokens: the threshold after each cycle.
    """

    def __init__(
        self, configured_mb_s: float, carried_mb_s: float, what: Senders, seed: int = 0
    ) -> None:
        planning = PlanningConfig(
            remote_cluster="west", egress_mb_s=configured_mb_s, threshold_tokens=BASE_TOKENS
        )
        self.mesh = Mesh(planning=planning, changes=RoleChanges.OFF)
        self.mesh.join(worker_info("p"), worker_info("d", Role.DECODE))
        self.reasons: list[AdjustReason] = []
        self.tokens: list[float] = []
        self.senders: dict[str, Sender] = {}
        self._events, self._draw = EventQueue(), random.Random(seed)
        self._link = SharedLink(self._events, carried_mb_s * 1e6)
        self._lost_share = what.lost_share
        for number in range(what.count):
            name, link = f"far{number}", self._link
            if what.own_mb_s:
                link = SharedLink(self._events, what.own_mb_s * 1e6)
            self.mesh.join(worker_info(name, cluster="west"))
            self.senders[name] = Sender(self._events, link, what.pause_s, self._draw)
            self._events.after(REPORT_S * self._draw.random(), partial(self._report, name))

    def carry(self, mb_s: float) -> None:
        """From now on the link carries so much."""
        self._link.set_bandwidth(mb_s * 1e6)

    def vanish(self, name: str) -> None:
        """It is gone in the middle of what it does, and its stream with it."""
        self.senders[name].is_alive = False
        assert self.mesh.fleet.leave(self.mesh.members[name])

    async def seconds(self, count: int) -> None:
        """So many cycles."""
        for _ in range(count):
            passed: list[bool] = []
            self._events.after(1.0, partial(passed.append, True))
            self._events.run(partial(bool, passed))
            self._follow()
            await self.mesh.planner.cycle(may_order=False)
            threshold = self.mesh.planner._loops("m").threshold
            self.reasons.append(threshold.reason)
            self.tokens.append(threshold.tokens)

    def busy_share(self) -> float:
        """Of the link, so far."""
        return self._link.use_until_now()[1] / self._events.now()

    def sending_share(self, name: str) -> float:
        """Of one worker, so far."""
        now = self._events.now()
        return self.senders[name].sending.seconds(now) / now

    def full_share(self, cycles: int) -> float:
        """Of the last cycles, those that found the link full."""
        return Counter(self.reasons[-cycles:])[AdjustReason.LINK_FULL] / cycles

    def _follow(self) -> None:
        self.mesh.clock.advance(max(self._events.now() - self.mesh.clock.now(), 0.0))

    def _report(self, name: str) -> None:
        self._follow()
        sender = self.senders[name]
        if not sender.is_alive:
            return
        if self._draw.random() >= self._lost_share:
            self.mesh.report(
                name,
                **IDLE,
                sent_bytes_total=int(sender.sent),
                sending_bytes=int(sender.waiting),
                sending_s_total=sender.sending.seconds(self._events.now()),
            )
        self._events.after(REPORT_S, partial(self._report, name))
