"""Runs the loops over many requests: threshold and roles each second, the split every few minutes.

Their decisions go to the router, to the workers as orders, and to the decision log.
Tests: tests/unit/scheduler/test_planner.py, tests/e2e/test_live_policies.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Hashable, Mapping

from kvmesh.core.clock import Clock
from kvmesh.core.details import FleetWorker, ModelDetail
from kvmesh.core.turns import WORKERS_IN_A_TURN, Parts, in_turns, rest_s
from kvmesh.core.types import Role, RoutePlan, RouteQuery, WorkerId
from kvmesh.metadata.store import FleetStore, StoreUnavailableError
from kvmesh.policy.allocation_loop import Allocation
from kvmesh.policy.composition import Composition
from kvmesh.policy.group_loops import givers
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.offload import OffloadState
from kvmesh.policy.prefix_source import FetchPace
from kvmesh.policy.role_loop import CYCLE_S
from kvmesh.policy.role_switch import STEADY, ScaleSignal
from kvmesh.sim.profile import Profile
from services.scheduler import metrics
from services.scheduler.config import PlanningConfig
from services.scheduler.decisions import DecisionLog
from services.scheduler.demand import DemandBoard
from services.scheduler.fleet import Fleet
from services.scheduler.model_loops import ModelLoops
from services.scheduler.role_orders import RoleChanges, RoleOrders
from services.scheduler.scale_orders import ScaleOrders

LEASE = "planner"
LEASE_TTL_S = 5.0
ASKED_WITHIN_S = 30.0
"""Seconds since the last query after which this scheduler does not order role changes.

Only a scheduler that gateways ask knows the waiting requests.
"""


class Planner:
    """The loops of all models.

    Args:
        changes: whether role changes are ordered, recommended, or off.
        store: holds the planner's lease, so that only one of several schedulers changes roles;
            None if this is the only scheduler.
        owner: this scheduler's name in the lease.
    """

    def __init__(
        self,
        fleet: Fleet,
        policy: Composition,
        config: PlanningConfig,
        decisions: DecisionLog,
        clock: Clock,
        *,
        changes: RoleChanges,
        store: FleetStore | None = None,
        owner: str = "",
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._config = config
        self._decisions = decisions
        self._clock = clock
        self._changes = changes
        self._store = store
        self._owner = owner
        self._models: dict[str, ModelLoops] = {}
        self._scale: dict[GroupKey, ScaleSignal] = {}
        self._last_cycle = clock.now()
        self._last_asked = -math.inf
        self._window_ends = self._last_cycle + config.monitor_s
        self.demand = DemandBoard()
        self.role_orders = RoleOrders(decisions)
        self.scale_orders = ScaleOrders(decisions)
        self.on_details: Callable[[], None] = lambda: None
        """Called when the result of `details` changes."""
        self.on_query: Callable[[RouteQuery, float], None] = lambda _query, _now: None
        """Called with each query that asks for a plan, and the time."""
        self.profile: Profile | None = None
        """Costs of the model that the profile names, until they are measured."""
        self._shown: list[ModelDetail] = []

    # --- for routes --------------------------------------------------------------------------

    def offload(self, model: str) -> OffloadState:
        """The remote cluster and the threshold in force for a model."""
        return self._loops(model).offload

    def pace(self, model: str) -> FetchPace:
        """Measured speeds of a model's prefill and KV transfer."""
        return self._loops(model).pace

    def links(self, model: str) -> Mapping[tuple[WorkerId, WorkerId], float]:
        """Measured seconds to move a token's KV between a model's workers."""
        return self._loops(model).links

    def details(self) -> list[ModelDetail]:
        """The thresholds in force of every model, for people."""
        details = []
        for name, loops in self._models.items():
            tokens = loops.offload.threshold_tokens
            details.append(
                ModelDetail(name, loops.offload.remote, tokens if math.isfinite(tokens) else None)
            )
        return details

    def note_route(self, gateway: Hashable, query: RouteQuery, plan: RoutePlan | None) -> None:
        """Adds a query and its plan to the loops' data."""
        self._last_asked = self._clock.now()
        self.on_query(query, self._last_asked)
        is_new = self.demand.note_query(gateway, query, self._last_asked)
        if plan is None:
            return
        if is_new:
            uncached = query.num_tokens - plan.prefill[0].cached_tokens
            loops = self._loops(query.model)
            loops.note_prompt(query, uncached)

    def _loops(self, model: str) -> ModelLoops:
        if model not in self._models:
            profile = self.profile
            expected = profile.serving if profile and profile.name == model else None
            self._models[model] = ModelLoops(self._policy, self._config, expected)
        return self._models[model]

    # --- the loops ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs both loops, until cancelled."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._run_fast())
                loops.create_task(self._run_slow())
        finally:
            if self._store is not None:
                with contextlib.suppress(StoreUnavailableError):
                    await self._store.release_lease(LEASE, self._owner)

    async def _run_fast(self) -> None:
        pause_s = CYCLE_S
        while True:
            await asyncio.sleep(pause_s)
            began = self._clock.now()
            await self.cycle(may_order=await self._may_order())
            pause_s = rest_s(CYCLE_S, self._clock.now() - began)

    async def _run_slow(self) -> None:
        while True:
            await asyncio.sleep(self._config.reallocate_s)
            await self.reallocate(may_order=await self._may_order())

    async def _may_order(self) -> bool:
        return self.may_change_roles and await self.leads()

    @property
    def may_change_roles(self) -> bool:
        """Whether workers may be ordered to change their role."""
        return self._changes is RoleChanges.APPLY

    async def leads(self) -> bool:
        """Whether this one of several schedulers gives orders now."""
        is_asked = self._clock.now() - self._last_asked <= ASKED_WITHIN_S
        return (is_asked or self._store is None) and await self._holds_lease()

    async def _holds_lease(self) -> bool:
        if self._store is None:
            return True
        try:
            return await self._store.acquire_lease(LEASE, self._owner, LEASE_TTL_S)
        except StoreUnavailableError:
            return False  # another scheduler may hold the lease

    async def cycle(self, *, may_order: bool) -> None:
        """Runs one step of the fast loop."""
        now = self._clock.now()
        elapsed_s = max(now - self._last_cycle, 1e-3)
        self._last_cycle = now
        models = await in_turns(self._workers_by_model())
        ends_window = self._policy.monitor and now >= self._window_ends
        if ends_window:
            self._window_ends = now + self._config.monitor_s
        # The loops of models without workers are dropped, with all that they learned.
        self._models = {name: loops for name, loops in self._models.items() if name in models}
        self.demand.prune(models.keys(), now)
        self._scale = {key: each for key, each in self._scale.items() if key.model in models}
        self.scale_orders.keep(self._scale.keys())
        if self.role_orders.num_recommended:
            here = {each.info.worker_id for workers in models.values() for each in workers}
            self.role_orders.keep(here)
        for model, workers in models.items():
            loops, demand = self._loops(model), self.demand.current(model, now)
            num_new = self.demand.take_new(model)
            home = await in_turns(loops.home(workers))
            await in_turns(loops.observe(workers, home, demand, num_new, elapsed_s))
            if loops.adjust(workers, home, demand, elapsed_s):
                threshold = loops.threshold
                self._decisions.add_fleet(
                    "threshold", threshold.reason.name.lower(), model=model, tokens=threshold.tokens
                )
            metrics.THRESHOLD_TOKENS.labels(model).set(loops.threshold.tokens)
            for ends, travel_s in loops.pace.between_token_s.items():
                metrics.PATH_TOKEN_SECONDS.labels(model, *ends).set(travel_s)
            await asyncio.sleep(0)  # routes come first
            if self._policy.switch_roles and self._changes is not RoleChanges.OFF:
                wanted = await self._switch_roles(model, loops, home, may_order=may_order)
                if self.role_orders.num_recommended:
                    # Recommendations for other models' workers stay: they were not considered.
                    names = {each.info.worker_id for each in workers}
                    self.role_orders.withdraw(names, wanted)
            if ends_window and self._changes is not RoleChanges.OFF:
                self._move_ratios(model, loops, home, may_order=may_order)
        self._show_details()

    def _move_ratios(
        self, model: str, loops: ModelLoops, home: list[FleetWorker], *, may_order: bool
    ) -> None:
        """Changes the roles of a group's workers permanently, if the monitor says so."""
        for found in loops.end_window(home):
            role, reason = found.step.grow, found.step.reason
            giving = givers(role, found.members, found.step.count)
            if role is None or not giving:
                self._decisions.add_fleet(
                    "ratio", reason.name.lower(), model=model, group=found.group.name
                )
                continue
            ordered = [
                self.role_orders.change("ratio", giver, role, reason, may_order=may_order)
                for giver in giving
            ]
            if any(ordered):
                loops.carried_out(found)

    def _show_details(self) -> None:
        details = self.details()
        if details != self._shown:
            self._shown = details
            self.on_details()

    async def _switch_roles(
        self, model: str, loops: ModelLoops, home: list[FleetWorker], *, may_order: bool
    ) -> set[tuple[WorkerId, Role]]:
        """Runs the role loops. Returns the wanted changes."""
        now = self._clock.now()
        demand = self.demand.current(model, now)
        wanted: set[tuple[WorkerId, Role]] = set()
        for work in await in_turns(loops.role_work(home, demand)):
            cycle = await in_turns(work.cycle(now))
            group = work.group
            labels = (model, group.cluster, group.scenario)
            metrics.LOAD_SCORE.labels(*labels, "prefill").set(cycle.fleet.prefill)
            metrics.LOAD_SCORE.labels(*labels, "decode").set(cycle.fleet.decode)
            for switch in cycle.switches:
                wanted.add((switch.worker_id, switch.role))
                if self.role_orders.change(
                    "switch", switch.worker_id, switch.role, switch.reason, may_order=may_order
                ):
                    work.loop.carried_out(switch)
            before = self._scale.get(group, STEADY)
            signal = self.scale_orders.signal(work, cycle, before, now)
            self._scale[group] = signal
            members = [each.info.worker_id for each in work.members]
            # Idle workers are seen by a scheduler that nobody asks, too; waiting requests are not.
            leads = self.leads if signal.step > 0 else self._holds_lease
            await self.scale_orders.follow(group, members, signal, leads)
        return wanted

    async def reallocate(self, *, may_order: bool) -> None:
        """Runs one step of the slow loop."""
        if not self._policy.reallocate or self._changes is RoleChanges.OFF:
            return
        for model, workers in (await in_turns(self._workers_by_model())).items():
            loops = self._loops(model)
            question = loops.question(workers)
            if question is None or not question.is_open(switch_roles=self._policy.switch_roles):
                continue
            # In a thread: with many workers the search takes longer than a route may wait.
            found = await asyncio.to_thread(question.answer)
            here = (await in_turns(self._workers_by_model())).get(model, [])
            self._reallocate(model, loops, found, here, may_order=may_order)

    def _reallocate(
        self,
        model: str,
        loops: ModelLoops,
        found: Allocation,
        workers: list[FleetWorker],
        *,
        may_order: bool,
    ) -> None:
        move, role = found.move, found.move.to_role
        giver, moved = loops.giver(role, workers), False
        if giver is None or role is None:
            self._decisions.add_fleet(
                "reallocation", move.reason.name.lower(), model=model, gain=round(move.gain, 4)
            )
        else:
            moved = self.role_orders.change(
                "reallocation", giver, role, move.reason, may_order=may_order
            )
        loops.accept(found, workers, moved=moved)

    def _workers_by_model(self) -> Parts[dict[str, list[FleetWorker]]]:
        models: dict[str, list[FleetWorker]] = {}
        for part in self._fleet.workers_in_parts(WORKERS_IN_A_TURN):
            for worker in part:
                models.setdefault(worker.info.model, []).append(worker)
            yield
        return models
