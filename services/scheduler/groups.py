"""Brings groups of workers to the state that people wish for, by `policy/group_life.py`.

The store holds the wishes. The launcher lists the started workers, and the fleet the registered
ones. So another scheduler can continue where a killed one stopped. One of several schedulers gives
orders; all of them close workers for new requests.
Tests: tests/unit/scheduler/test_groups_life.py, tests/e2e/test_group_life.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import TypeAlias

from kvmesh.core.clock import Clock
from kvmesh.core.errors import KvMeshError, ProtocolError
from kvmesh.core.launch import Launched, Launcher, LaunchError
from kvmesh.core.types import Role, WorkerId, WorkerLoad
from kvmesh.metadata.store import FleetStore, StoreUnavailableError
from kvmesh.policy.group_life import (
    GroupMember,
    GroupState,
    GroupStep,
    GroupWish,
    group_step,
    is_member,
    wish_of,
)
from kvmesh.policy.peer_checks import CheckState
from kvmesh.rpc.convert_group import group_view, stored_wish, wish_to_proto
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1 import scheduler_service_pb2 as pb
from services.scheduler.decisions import DecisionLog
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet

log = event_logger(__name__)

LOOK_S = 0.5
LEASE = "groups"
LEASE_TTL_S = 5.0
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Bounds in seconds of the pause between starts of workers that end before they register."""


MOST_PROBLEMS = 3
"""Number of workers whose problems are shown of a group."""

WHAT_TO_DO = (
    "These workers get no requests, and are tried again every few seconds. Compare "
    "server.advertise_host, worker.data_port, server.secret_file and server.tls of both sides, and "
    "the firewall between them."
)


Loads: TypeAlias = Mapping[WorkerId, WorkerLoad]
"""Loads of the registered workers."""


class NoLauncherError(KvMeshError):
    """This scheduler has no launcher to start workers."""


@dataclasses.dataclass(slots=True)
class _Starts:
    """The results of starting workers for a group.

    Attributes:
        awaited: workers that were started and have not registered yet.
    """

    awaited: set[WorkerId] = dataclasses.field(default_factory=set)
    num_failed: int = 0
    not_before: float = 0.0


class Groups:
    """The groups of one scheduler.

    Args:
        store: keeps the wishes, and the lease with which one of several schedulers gives orders.
        owner: this scheduler's name in the lease.
    """

    def __init__(
        self,
        fleet: Fleet,
        feed: FleetFeed,
        launcher: Launcher,
        store: FleetStore,
        decisions: DecisionLog,
        clock: Clock,
        *,
        owner: str,
    ) -> None:
        self._fleet = fleet
        self._feed = feed
        self._launcher = launcher
        self._store = store
        self._decisions = decisions
        self._clock = clock
        self._owner = owner
        self._starts: dict[str, _Starts] = {}
        self._states: dict[str, GroupState] = {}
        self._stopping: dict[WorkerId, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()
        self._problem = ""

    async def run(self) -> None:
        """Looks at the groups periodically, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Looks at the groups once, and takes the next steps."""
        problem = ""
        try:
            async with self._changing:
                await self._look()
        except (LaunchError, StoreUnavailableError) as error:
            problem = str(error)
        if problem and not self._problem:  # logged once: a launcher may start after this scheduler
            log.info("groups_not_seen", error=problem)
        self._problem = problem

    async def _look(self) -> None:
        wishes = await self._wishes()
        kept = await self._launcher.list() if wishes else []
        leads = bool(wishes) and await self._store.acquire_lease(LEASE, self._owner, LEASE_TTL_S)
        here = self._loads() if wishes else {}
        closed: set[WorkerId] = set()
        for told in wishes.values():
            wish, step = told, group_step(told, self._members(told, kept, here))
            if step.opens and leads:
                # Stored first: a scheduler that takes over must not close workers that served.
                wish = dataclasses.replace(told, opened=told.checkpoint)
                await self._put(wish)
                step = group_step(wish, self._members(wish, kept, here))
            closed |= step.closed
            self._note(wish, step)
            if leads:
                closed |= await self._carry_out(wish, step, kept, here)
        if self._fleet.close(frozenset(closed)):
            self._feed.changed()

    async def _wishes(self) -> dict[str, GroupWish]:
        found: dict[str, GroupWish] = {}
        for scenario, payload in (await self._store.list_groups()).items():
            try:
                found[scenario] = stored_wish(payload)
            except ProtocolError as error:
                log.warning("group_not_read", scenario=scenario, error=str(error))
        return found

    async def _put(self, wish: GroupWish) -> None:
        await self._store.put_group(wish.scenario, wish_to_proto(wish).SerializeToString())

    def _loads(self) -> Loads:
        return {info.worker_id: load for info, load in self._fleet.reports()}

    def _members(self, wish: GroupWish, kept: Iterable[Launched], here: Loads) -> list[GroupMember]:
        held = self._fleet.held
        return [
            GroupMember(
                each,
                each.worker_id in here,
                _is_idle(here.get(each.worker_id)),
                _connection(held, each.worker_id),
            )
            for each in kept
            if is_member(each) and each.spec.scenario == wish.scenario
        ]

    async def _carry_out(
        self, wish: GroupWish, step: GroupStep, kept: Sequence[Launched], here: Loads
    ) -> frozenset[WorkerId]:
        """Starts and stops workers. Returns the started workers that must not serve yet."""
        for name in step.stop:
            chosen_by_routes = name in here and name not in self._fleet.closed
            if name not in self._stopping and not chosen_by_routes:
                task = asyncio.create_task(self._stop(name), name=f"stop {name}")
                self._stopping[name] = task
                task.add_done_callback(partial(self._stopped, name))
        if step.state is GroupState.GONE:
            await self._store.remove_group(wish.scenario)
        names = {each.worker_id for each in kept if is_member(each)}
        if not self._may_start(wish, names, here.keys()):
            return frozenset()
        started: set[WorkerId] = set()
        for spec in step.start:
            name = await self._launcher.start(spec)
            self._starts[wish.scenario].awaited.add(name)
            started.add(name)
            facts = {"worker_id": name, "role": spec.role.value, "checkpoint": spec.checkpoint}
            log.info("group_worker_started", scenario=wish.scenario, **facts)
        return frozenset() if wish.opened == wish.checkpoint else frozenset(started)

    def _may_start(self, wish: GroupWish, names: Set[WorkerId], here: Set[WorkerId]) -> bool:
        """Whether workers may start now: not at once after some ended without having served."""
        starts = self._starts.setdefault(wish.scenario, _Starts())
        failed = starts.awaited - names - here
        if starts.awaited & here:
            starts.num_failed = 0
        starts.awaited -= failed | here
        now = self._clock.now()
        if failed:
            pause_s = min(FIRST_PAUSE_S * 2**starts.num_failed, MAX_PAUSE_S)
            starts.num_failed += 1
            starts.not_before = now + pause_s
            log.warning("group_workers_failed", scenario=wish.scenario, worker_ids=sorted(failed))
        return now >= starts.not_before

    async def _stop(self, name: WorkerId) -> None:
        try:
            await self._launcher.stop(name)
        except LaunchError as error:
            log.warning("group_worker_not_stopped", worker_id=name, error=str(error))

    def _stopped(self, name: WorkerId, _task: asyncio.Task[None]) -> None:
        del self._stopping[name]

    def _note(self, wish: GroupWish, step: GroupStep) -> None:
        if self._states.get(wish.scenario) is step.state:
            return
        self._states[wish.scenario] = step.state
        facts = {"scenario": wish.scenario, "checkpoint": wish.checkpoint}
        self._decisions.add_fleet("group", step.state.value, **facts)
        log.info("group_state", state=step.state.value, **facts)

    # --- for operators --------------------------------------------------------------------------

    async def apply(self, wish: GroupWish) -> None:
        """Stores a wish for a group.

        Raises:
            StoreUnavailableError: the wish cannot be stored.
            LaunchError: the launcher does not answer.
        """
        async with self._changing:
            before = (await self._wishes()).get(wish.scenario)
            if before is None:  # workers from before the first wish continue to serve
                before = wish_of(await self._launcher.list(), wish.scenario)
            self._starts.pop(wish.scenario, None)
            await self._put(dataclasses.replace(wish, opened=before.opened))
        log.info("group_wished", scenario=wish.scenario, checkpoint=wish.checkpoint)

    async def scale(
        self, members: Collection[WorkerId], role: Role, step: int, *, sizes: Container[int]
    ) -> str:
        """Wishes for another number of workers in a group that is ready.

        Args:
            members: the group's workers.
            step: number of workers to add; negative to end some.
            sizes: the numbers of workers of a role that are allowed.

        Returns:
            why it was not wished for; empty if it was.

        Raises:
            StoreUnavailableError: the wish cannot be stored.
            LaunchError: the launcher does not answer.
        """
        async with self._changing:
            kept = await self._launcher.list()
            found = {e.spec.scenario for e in kept if e.worker_id in members and is_member(e)}
            if len(found) != 1:
                return "none of its workers, or those of several groups, are the launcher's"
            scenario = found.pop()
            wish = (await self._wishes()).get(scenario) or wish_of(kept, scenario)
            state = group_step(wish, self._members(wish, kept, self._loads())).state
            if state is not GroupState.READY:
                return f"the group is {state.value}"
            changed = wish.with_more(role, step)
            if changed.count(role) not in sizes:
                return f"{changed.count(role)} {role.value} workers are not allowed"
            self._starts.pop(scenario, None)
            await self._put(changed)
        log.info("group_scaled", scenario=scenario, role=role.value, step=step)
        return ""

    async def views(self) -> list[pb.GroupView]:
        """All groups, for people.

        Raises:
            StoreUnavailableError: the wishes cannot be read.
            LaunchError: the launcher does not answer.
        """
        wishes, kept = await self._wishes(), await self._launcher.list()
        scenarios = {each.spec.scenario for each in kept if is_member(each)}
        here = self._loads()
        views = []
        for scenario in sorted(scenarios | wishes.keys()):
            wish = wishes.get(scenario) or wish_of(kept, scenario)
            members = self._members(wish, kept, here)
            problem = self._problem_of(wish, members)
            views.append(group_view(wish, group_step(wish, members), members, problem))
        return views

    def _problem_of(self, wish: GroupWish, members: Iterable[GroupMember]) -> str:
        """Why a group does not get on, and what to do; empty if it does."""
        starts = self._starts.get(wish.scenario, _Starts())
        if starts.num_failed:
            return f"its workers ended {starts.num_failed} times before they served"
        held = self._fleet.held
        problems = [f"{each.name}: {held[each.name]}" for each in members if held.get(each.name)]
        if not problems:
            return ""
        more = f" (and {len(problems) - MOST_PROBLEMS} more workers)"
        shown = "; ".join(problems[:MOST_PROBLEMS]) + (more if problems[MOST_PROBLEMS:] else "")
        return f"{shown}. {WHAT_TO_DO}"


def _connection(held: Mapping[WorkerId, str], name: WorkerId) -> CheckState:
    """Whether a worker can exchange KV with its peers.

    Args:
        held: see `Fleet.held`.
    """
    if name not in held:
        return CheckState.VERIFIED
    return CheckState.FAILED if held[name] else CheckState.PENDING


def _is_idle(load: WorkerLoad | None) -> bool:
    """Whether nothing runs on a worker, or it is not registered."""
    if load is None:
        return True
    return not (
        load.prefill_active or load.decode_running or load.decode_reserved or load.decode_preempted
    )
