"""Fills the places of lost and ejected workers, by `policy/substitute.py`.

Exactly one worker takes a place. When a lost worker is back, as a new process, it becomes a spare
if a spare took its place, with or without a model. The next life of an empty spare is empty again.
A substitute that was taken from another place goes back. If a process was started as the
substitute, one of the two is stopped. A launcher kills a worker that hangs when its place is taken,
or when its own next life is the fastest substitute. The last worker of a role stays a member until
then. This state is in memory: a restarted scheduler treats a worker that comes back as an
additional worker.
Tests: tests/unit/scheduler/test_substitutes.py, tests/unit/scheduler/test_empty_substitutes.py,
tests/e2e/test_substitutes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from kvmesh.core.clock import Clock
from kvmesh.core.details import FleetWorker
from kvmesh.core.empty_spare import Assignment
from kvmesh.core.health import Health
from kvmesh.core.launch import Launcher, LaunchError, LaunchSpec
from kvmesh.core.turns import WORKERS_IN_A_TURN, rest_s
from kvmesh.core.types import Role, WorkerId, WorkerInfo
from kvmesh.policy.health import REST_S
from kvmesh.policy.substitute import START_S, Means, Member, Option, Paces, Place, substitutes
from kvmesh.telemetry.logs import event_logger
from services.scheduler import metrics
from services.scheduler.decisions import DecisionLog
from services.scheduler.empty_spares import EmptySpares
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet
from services.scheduler.planner import Planner
from services.scheduler.role_orders import RoleChanges

log = event_logger(__name__)

LOOK_S = 0.25
"""Seconds between two looks while a place is open or taken by a substitute."""

LATE_FACTOR = 3.0
LATE_S = 1.0
"""A substitute fails if it takes this multiple of the expected seconds, plus LATE_S."""

GATHER_S = 0.02
"""Seconds in which arrivals and departures are handled together."""

MAX_CHOICES = 8
"""Maximum number of choices in one look.

Each weighs the whole fleet, so that routes go on even if half of the fleet is lost at once.
"""

MOST_STARTED = 3
"""Maximum number of processes that are started for one place."""

FORGET_S = 3600.0
"""Seconds after which a lost worker is no longer expected back."""

GivePlace = Callable[[WorkerId, Role, str, str], bool]
"""Orders a worker to take a role in a scenario's group, with a reason. False if it cannot."""


@dataclass(frozen=True, slots=True)
class _Here:
    """The fleet at one look.

    Attributes:
        workers: the present workers by name.
        hanging: those whose step does not end.
        members: those that may take a place, unless they take one already.
    """

    workers: dict[WorkerId, FleetWorker]
    hanging: set[WorkerId]
    members: list[Member]


@dataclass(slots=True)
class _Loss:
    """A place that a worker left.

    Attributes:
        lived: its worker's process is alive but ill; if False, its next life is expected.
        hangs: the process is alive and does not answer.
        ended: the launcher was told to kill it.
        option: the chosen substitute; None if there is none yet.
        before: the substitute's info before it was ordered to the place.
        failed: chosen substitutes that did not take the place.
        weighed_at: when the fleet was last searched for a substitute.
    """

    info: WorkerInfo
    at: float
    lived: bool
    hangs: bool = False
    ended: bool = False
    num_started: int = 0
    option: Option | None = None
    before: WorkerInfo | None = None
    ordered_at: float = 0.0
    is_filled: bool = False
    failed: tuple[WorkerId, ...] = ()
    weighed_at: float = -math.inf


class Substitutes:
    """The places that are open or taken by substitutes.

    Args:
        planner: knows how fast prompts are computed, and whether this scheduler may give orders.
        changes: whether substitutions are ordered, recommended, or off.
        launcher: starts processes and ends those that hang; None if there is none.
    """

    def __init__(
        self,
        fleet: Fleet,
        feed: FleetFeed,
        planner: Planner,
        decisions: DecisionLog,
        clock: Clock,
        empties: EmptySpares,
        *,
        changes: RoleChanges,
        launcher: Launcher | None = None,
    ) -> None:
        self._launcher = launcher
        self._empties = empties
        self._fleet = fleet
        self._feed = feed
        self._planner = planner
        self._decisions = decisions
        self._clock = clock
        self._changes = changes
        self._losses: dict[WorkerId, _Loss] = {}
        self._renamed: set[WorkerId] = set()
        self._ready_s: dict[Means, float] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self.give_place: GivePlace = lambda _worker, _role, _scenario, _reason: False
        """Sends the order; set by the part that is connected to the workers."""

    async def run(self) -> None:
        """Looks at the fleet when a worker arrives, leaves or falls ill, until cancelled."""
        while self._changes is not RoleChanges.OFF:
            version, began = self._fleet.version, self._clock.now()
            is_open = await self.look()
            pause_s = rest_s(GATHER_S, self._clock.now() - began)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if is_open else None):
                    await self._feed.wait_urgent_past(version)
            await asyncio.sleep(pause_s)

    async def look(self) -> bool:
        """Looks at the fleet once. Returns whether a place is open or taken by a substitute."""
        now = self._clock.now()
        self._take_losses(now)
        if not self._losses:
            return False
        # Only one scheduler gives orders. The others forget: they would not know the results.
        if not await self._planner.leads():
            self._losses.clear()
            return True  # ill workers are still ill when this scheduler may give orders
        here = await self._here()
        for loss in list(self._losses.values()):
            await self._follow(loss, here, now)
        is_open = [loss for loss in self._losses.values() if loss.option is None]
        for loss in sorted(is_open, key=lambda each: each.weighed_at)[:MAX_CHOICES]:
            loss.weighed_at = now
            await self._choose(loss, here, now)
            await asyncio.sleep(0)
        return True

    async def _here(self) -> _Here:
        workers: dict[WorkerId, FleetWorker] = {}
        for part in self._fleet.workers_in_parts(WORKERS_IN_A_TURN):
            workers.update((each.info.worker_id, each) for each in part)
            await asyncio.sleep(0)
        loads = {info.worker_id: load for info, load in self._fleet.reports()}
        members = [
            Member(each.info, loads[name], each.health, each.detail)
            for name, each in workers.items()
            if name in loads
        ]
        return _Here(workers, self._fleet.hanging(), members)

    def _take_losses(self, now: float) -> None:
        lost = [(info, False) for info in self._fleet.take_lost()]
        ill = [(info, True) for info in self._fleet.ill()]
        takers = self._takers()
        for info, lived in [*lost, *ill]:
            known = self._losses.get(info.worker_id)
            if known is not None:
                known.lived = known.lived and lived
            elif info.role is not Role.SPARE and info.worker_id not in takers | self._renamed:
                self._losses[info.worker_id] = _Loss(info, now, lived)

    def _takers(self) -> set[WorkerId]:
        """Workers that take a place or are to leave.

        They take no other place, and nobody takes theirs.
        """
        options = (each.option for each in self._losses.values())
        return {*(each.worker_id for each in options if each is not None), *self._fleet.closed}

    # --- one place -----------------------------------------------------------------------------

    async def _follow(self, loss: _Loss, here: _Here, now: float) -> None:
        found = here.workers.get(loss.info.worker_id)
        hangs = loss.info.worker_id in here.hanging
        if found is not None and found.health < Health.DEGRADED and not hangs:
            if not self._is_loading(loss, here, now):
                self._returned(loss, found, here)
            return
        loss.hangs = loss.lived and hangs
        if now > loss.at + FORGET_S:
            del self._losses[loss.info.worker_id]
            return
        if self._is_back_empty(loss):
            return
        option = loss.option
        if option is not None and self._changes is RoleChanges.APPLY:
            self._watch(loss, option, here, now)
            await self._end_hung(loss, option)

    def _is_loading(self, loss: _Loss, here: _Here, now: float) -> bool:
        """Whether an empty spare still loads the model for the place of a worker that is back."""
        option = loss.option
        if option is None or option.means is not Means.EMPTY or option.worker_id in here.workers:
            return False
        return self._changes is RoleChanges.APPLY and not _is_late(loss, option, now)

    def _is_back_empty(self, loss: _Loss) -> bool:
        """Handles a lost worker whose next life is an empty spare.

        Returns whether another worker keeps its place. If one only helps out there, the empty spare
        loads the model again. If nobody was chosen, it is among those to choose from.
        """
        name, option = loss.info.worker_id, loss.option
        spare = self._empties.find(name)
        if option is None or spare is None or not spare.is_waiting:
            return False
        if option.means is Means.RETURN:
            loss.option = None
        elif option.means in (Means.FLIP, Means.SLACK):
            self._empties.assign(name, Assignment.like(loss.info, "its place has a helper"))
        elif loss.is_filled:
            del self._losses[name]
            self._note(loss, "returned", f"{option.worker_id} has the place", name)
            return True
        return False

    def _watch(self, loss: _Loss, option: Option, here: _Here, now: float) -> None:
        """Checks whether the substitute takes the place and stays there."""
        taker = here.workers.get(option.worker_id)
        hangs = option.worker_id in here.hanging
        is_there = taker is not None and taker.health < Health.DEGRADED and not hangs
        if loss.is_filled and is_there:
            return
        if is_there and taker is not None and _fills(taker.info, loss.info):
            self._filled(loss, option, now)
        elif loss.is_filled or _is_late(loss, option, now):
            loss.failed = (*loss.failed, option.worker_id)
            loss.option, loss.is_filled = None, False
            if option.means is Means.PROCESS:
                self._stop(option.worker_id)

    async def _end_hung(self, loss: _Loss, option: Option) -> None:
        """Kills a hanging process if its place is taken, or its next life is to take the place."""
        is_time = loss.is_filled or option.means is Means.RETURN
        if self._launcher is None or not loss.hangs or loss.ended or not is_time:
            return
        loss.ended = True
        name = loss.info.worker_id
        try:
            next_name = await self._launcher.restart(name)
        except LaunchError as error:
            log.warning("not_ended", worker_id=name, error=str(error))
            return
        self._note(loss, "ended", "it hangs, and its launcher kills it", name)
        if next_name != name:
            self._rename(loss, next_name)

    def _rename(self, loss: _Loss, name: WorkerId) -> None:
        """Expects a lost worker under the name of its next life. The old name never returns."""
        old, option = loss.info.worker_id, loss.option
        self._renamed.add(old)
        self._losses[name] = self._losses.pop(old)
        loss.info = dataclasses.replace(loss.info, worker_id=name)
        loss.lived = False
        if option is not None and option.worker_id == old:
            loss.option = dataclasses.replace(option, worker_id=name)

    async def _choose(self, loss: _Loss, here: _Here, now: float) -> None:
        taken = {*self._takers(), *loss.failed}
        members = [each for each in here.members if each.info.worker_id not in taken]
        empties = [each for each in self._empties.all() if each.worker_id not in loss.failed]
        back_s, new_s, load_s = (
            self._back_s(loss, now),
            self._new_s(loss, here),
            _load_s(loss, here),
        )
        place = Place(loss.info, back_s, new_s, load_s)
        paces = Paces(self._ready_s, self._planner.pace(loss.info.model).token_s)
        for option in substitutes(place, members, paces, empties):
            chosen = await self._taken(loss, option)
            if chosen is not None:
                loss.option, loss.ordered_at = chosen, now
                loss.before = self._before(loss, chosen, here)
                self._note(loss, chosen.means.name.lower(), chosen.reason, chosen.worker_id)
                return

    async def _taken(self, loss: _Loss, option: Option) -> Option | None:
        """Orders a substitute. Returns it with its name; None if it cannot take the place."""
        match option.means:
            case Means.RETURN:
                return option
            case Means.PROCESS:
                return await self._started(loss, option)
            case Means.EMPTY:
                is_ordered = self._assigned(loss, option)
            case Means.FLIP if not self._planner.may_change_roles:
                is_ordered = False
            case _:
                is_ordered = self._ordered(loss, option)
        return option if is_ordered else None

    def _before(self, loss: _Loss, option: Option, here: _Here) -> WorkerInfo | None:
        """The role and group to which a substitute is ordered when it is no longer needed."""
        if self._changes is not RoleChanges.APPLY or option.means is Means.RETURN:
            return None
        if option.means is Means.EMPTY:
            return dataclasses.replace(loss.info, role=Role.SPARE, scenario="")
        taker = here.workers.get(option.worker_id)
        return None if taker is None else taker.info

    def _new_s(self, loss: _Loss, here: _Here) -> float | None:
        """Estimated seconds until a new process serves: the median start time for its model.

        At least as long as the lost worker took: the process starts on the same machine, where
        the lost worker comes back by itself.
        """
        if self._launcher is None or loss.num_started >= MOST_STARTED:
            return None
        infos = [loss.info, *(each.info for each in here.workers.values())]
        starts = (info.origin.start_s for info in infos if info.model == loss.info.model)
        told = [start_s for start_s in starts if start_s]
        return max(statistics.median(told), loss.info.origin.start_s) if told else START_S

    async def _started(self, loss: _Loss, option: Option) -> Option | None:
        """Starts a process. Returns the option with its name; None if none was started."""
        if self._launcher is None or self._changes is not RoleChanges.APPLY:
            return option
        info = loss.info
        loss.num_started += 1
        try:
            kept = {each.worker_id: each.spec for each in await self._launcher.list()}
            before = kept.get(info.worker_id, LaunchSpec(info.role, model=info.model))
            spec = dataclasses.replace(before, role=info.role, scenario=info.scenario)
            name = await self._launcher.start(spec)
        except LaunchError as error:
            log.warning("not_started", lost=info.worker_id, error=str(error))
            return None
        return dataclasses.replace(option, worker_id=name)

    def _back_s(self, loss: _Loss, now: float) -> float | None:
        """Estimated seconds until the lost worker is back; None if it did not return in time."""
        name = loss.info.worker_id
        if name in loss.failed or self._empties.find(name) is not None:
            return None
        # A launcher kills a hanging worker, so its next life is expected.
        wakes_up = loss.lived and not (loss.hangs and self._launcher is not None)
        whole_s = REST_S if wakes_up else loss.info.origin.start_s or START_S
        away_s = now - loss.at
        # A worker that is late is expected to be late for as long again.
        return whole_s - away_s if away_s < whole_s else away_s

    def _ordered(self, loss: _Loss, option: Option) -> bool:
        if self._changes is not RoleChanges.APPLY:
            return True
        info = loss.info
        why = f"takes the place of {info.worker_id}: {option.reason}"
        return self.give_place(option.worker_id, info.role, info.scenario, why)

    def _assigned(self, loss: _Loss, option: Option) -> bool:
        if self._changes is not RoleChanges.APPLY:
            return True
        why = f"takes the place of {loss.info.worker_id}: {option.reason}"
        return self._empties.assign(option.worker_id, Assignment.like(loss.info, why))

    def _filled(self, loss: _Loss, option: Option, now: float) -> None:
        loss.is_filled = True
        self._ready_s[option.means] = now - loss.ordered_at
        seconds = round(now - loss.at, 3)
        self._note(loss, "filled", f"after {seconds} s", option.worker_id, seconds=seconds)

    def _returned(self, loss: _Loss, found: FleetWorker, here: _Here) -> None:
        """Ends the substitution: the worker that holds less KV of the group leaves the place."""
        name, info, option, before = found.info.worker_id, loss.info, loss.option, loss.before
        del self._losses[name]
        if option is not None and option.means is Means.PROCESS:
            in_place = loss.is_filled and found.info.incarnation != info.incarnation
            leaves, stays = (name, option.worker_id) if in_place else (option.worker_id, name)
            self._note(loss, "returned", f"{stays} has the place", leaves)
            self._stop(leaves)
            return
        is_other = option is not None and option.worker_id in here.workers.keys() - {name}
        if option is None or before is None or not is_other:
            if found.info.role is Role.SPARE:  # its configuration makes it a spare in its new life
                self._give(loss, name, info.role, info.scenario, "it is back as a spare")
            else:
                self._note(loss, "returned", "nobody else is in its place", name)
            return
        taker = option.worker_id
        # An empty spare that came after the lost worker holds no KV, so it makes room.
        is_first = option.means is Means.SPARE or (option.means is Means.EMPTY and loss.is_filled)
        if is_first and found.info.incarnation != info.incarnation:
            self._give(loss, name, Role.SPARE, "", f"{taker} took its place")
        else:
            self._give(loss, taker, before.role, before.scenario, f"{name} is back")

    def _stop(self, name: WorkerId) -> None:
        """Stops a process that is no longer needed, in the background."""
        if self._launcher is None or self._changes is not RoleChanges.APPLY:
            return
        task = asyncio.create_task(_stopped(self._launcher, name), name=f"stop {name}")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _give(self, loss: _Loss, name: WorkerId, role: Role, scenario: str, reason: str) -> None:
        if self._changes is RoleChanges.APPLY:
            self.give_place(name, role, scenario, reason)
        self._note(loss, "returned", reason, name)

    def _note(
        self, loss: _Loss, kind: str, reason: str, worker_id: WorkerId, **more: float
    ) -> None:
        info = loss.info
        outcome = "applied" if self._changes is RoleChanges.APPLY else "recommended"
        metrics.SUBSTITUTES.labels(info.cluster, info.scenario, kind, outcome).inc()
        facts = {
            "lost": info.worker_id,
            "role": info.role.value,
            "worker_id": worker_id,
            "why": reason,
            "outcome": outcome,
        }
        self._decisions.add_fleet("substitute", kind, **facts, **more)
        log.info("substitute", kind=kind, **facts, **more)


async def _stopped(launcher: Launcher, name: WorkerId) -> None:
    try:
        await launcher.stop(name)
    except LaunchError as error:
        log.warning("not_stopped", worker_id=name, error=str(error))


def _fills(info: WorkerInfo, lost: WorkerInfo) -> bool:
    return (info.role, info.scenario) == (lost.role, lost.scenario)


def _is_late(loss: _Loss, option: Option, now: float) -> bool:
    return now > loss.ordered_at + LATE_FACTOR * option.ready_s + LATE_S


def _load_s(loss: _Loss, here: _Here) -> float:
    """Estimated seconds in which an empty spare loads the lost worker's model.

    The median of those that did. Before, that of all workers of the model, which may have loaded it
    at the same time.
    """
    infos = (loss.info, *(each.info for each in here.workers.values()))
    origins = [info.origin for info in infos if info.model == loss.info.model]
    told = [each.load_s for each in origins if each.load_s]
    as_spares = [each.load_s for each in origins if each.load_s and each.assignment is not None]
    return statistics.median(as_spares or told) if told else START_S
