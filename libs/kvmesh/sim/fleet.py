"""The workers of a simulation, what routes see of them, and the links between them.

Tests: tests/unit/sim/test_fleet.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.core.errors import ConfigError
from kvmesh.core.types import (
    Endpoint,
    KvLayout,
    Placement,
    RequestId,
    Role,
    RoutePlan,
    RouteQuery,
    WorkerId,
    WorkerInfo,
)
from kvmesh.policy.fleet_index import SMALL_FLEET, FleetIndex
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView, WorkerView
from kvmesh.sim.events import EventQueue
from kvmesh.sim.host import Host
from kvmesh.sim.link import SharedLink
from kvmesh.sim.prefix_index import PrefixIndex
from kvmesh.sim.profile import Device, Profile
from kvmesh.sim.trace_request import TRACE_BLOCK
from kvmesh.sim.worker import SimWorker, WorkerListener, WorkerRules

MODEL = "simulated"
REMOTE = "remote"
"""Name of the offload cluster."""

LOST_AFTER_S = 3.0
"""A dead worker stays in the view for the length of its lease."""

_LAYOUT = KvLayout("simulated", "bfloat16", TRACE_BLOCK, 32, 1, 1)
_NOWHERE = Endpoint("simulated", 0)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers that are alike."""

    cluster: str
    device: str
    role: Role
    count: int


def parse_fleet(text: str) -> tuple[WorkerGroup, ...]:
    """Reads `CLUSTER:DEVICE:ROLE:COUNT,...`.

    Raises:
        ConfigError: a part is wrong.
    """
    groups: list[WorkerGroup] = []
    for part in text.split(","):
        try:
            cluster, device, role, count = part.split(":")
            groups.append(WorkerGroup(cluster, device, Role(role), int(count)))
        except ValueError as error:
            raise ConfigError(
                f"{part!r} is not CLUSTER:DEVICE:ROLE:COUNT, such as home:a100:prefill:4"
            ) from error
        if groups[-1].count < 0:
            raise ConfigError(f"{part!r} has a negative count")
    return tuple(groups)


class SimFleet:
    """Workers by id, with the view that decisions get.

    Args:
        report_interval_s: age of the loads in the view; 0 shows them as they are.
        order: for fleets too large to look at whole.
        grouped: a cluster is the P/D group of the scenario that it is named after.

    Attributes:
        openings: grows whenever a worker may accept what it refused before.
        host: of all workers; None where each has one of its own.
    """

    def __init__(
        self,
        events: EventQueue,
        profile: Profile,
        listener: WorkerListener,
        rules: WorkerRules,
        *,
        report_interval_s: float,
        order: FleetIndex | None = None,
        grouped: bool = False,
    ) -> None:
        self._events = events
        self._profile = profile
        self._listener = listener
        self._rules = rules
        self._report_interval_s = report_interval_s
        self.host = None if profile.sharing is None else Host(profile.sharing, events.now)
        self._order = order
        self._grouped = grouped
        self.workers: dict[WorkerId, SimWorker] = {}
        self.openings = 0
        self.index = PrefixIndex()
        self._views: dict[WorkerId, WorkerView] = {}
        self._changed: set[WorkerId] = set()
        self._view: FleetView | None = None
        self._next_report = 0.0
        self._num_routes = 0
        self._routed: dict[RequestId, RoutePlan] = {}  # since the last report
        self._own_links: dict[WorkerId, SharedLink] = {}
        links = profile.links
        self.between = SharedLink(events, links.between_bytes_per_s)

    def build(self, groups: tuple[WorkerGroup, ...]) -> None:
        """Starts all workers.

        Raises:
            ConfigError: a device is not in the profile.
        """
        for group in groups:
            if group.device not in self._profile.devices:
                known = ", ".join(sorted(self._profile.devices))
                raise ConfigError(f"there is no device {group.device!r}; the profile has {known}")
            device = self._profile.devices[group.device]
            for _ in range(group.count):
                name = WorkerId(f"{group.cluster}-{group.role.value}-{len(self.workers)}")
                info = _info(name, group, device)
                if self._rules.chains:
                    info = dataclasses.replace(info, pair_share=device.pair_share)
                if self._grouped:
                    info = dataclasses.replace(info, scenario=group.cluster)
                self._start(info, device)

    def _start(self, info: WorkerInfo, device: Device) -> None:
        worker = SimWorker(
            info,
            device,
            self._events,
            self._listener,
            self._rules,
            self.host,
        )
        self.workers[info.worker_id] = worker
        self.index.add(info.worker_id, worker.pool)
        link = SharedLink(self._events, self._profile.links.inside_bytes_per_s)
        self._own_links[info.worker_id] = link
        view = self._views[info.worker_id] = WorkerView(info, worker.load(), math.inf)
        if self._order is not None:
            self._order.update(view)
        self._view = None
        self.openings += 1

    def restart(self, worker_id: WorkerId) -> None:
        """Brings a dead worker back, empty."""
        dead = self.workers[worker_id]
        if not dead.alive:
            self._start(
                dataclasses.replace(dead.info, incarnation=dead.info.incarnation + 1), dead.device
            )

    def forget(self, dead: SimWorker) -> None:
        """Takes a dead worker out of the index now, and out of the view when its lease ends."""
        self.index.remove(dead.info.worker_id)
        self._events.after(LOST_AFTER_S, lambda: self._expire(dead))

    def _expire(self, dead: SimWorker) -> None:
        if self.workers[dead.info.worker_id] is dead:
            del self._views[dead.info.worker_id]
            if self._order is not None:
                self._order.remove(dead.info.worker_id)
            self._view = None

    def note_change(self, worker: SimWorker) -> None:
        """A worker's load or cache is another."""
        self._changed.add(worker.info.worker_id)
        self.index.note_change(worker.info.worker_id)

    def view(self) -> FleetView:
        """What a decision sees now."""
        due = self._report_interval_s == 0 or self._events.now() >= self._next_report
        if due and self._changed:
            for worker_id in self._changed & self._views.keys():
                worker = self.workers[worker_id]
                if worker.alive:
                    self._views[worker_id] = WorkerView(
                        worker.info,
                        worker.load(),
                        math.inf,
                        pending_tokens=worker.waiting_tokens,
                    )
            self._changed.clear()
            self._routed.clear()
            self._view = None
        if due and self._report_interval_s:
            self._next_report = self._events.now() + self._report_interval_s
        if self._view is None:
            self._view = FleetView(tuple(self._views.values()))
        return dataclasses.replace(self._view, num_routes=self._num_routes)

    def view_for(self, query: RouteQuery, matches: Mapping[WorkerId, int]) -> FleetView:
        """What a route for this query sees now; of a large fleet only the part that matters."""
        if self._order is None or len(self.workers) <= SMALL_FLEET:
            return self.view()
        # Sorted, since the index draws a random number for each.
        workers, update = self.workers, self._order.update
        for worker_id in sorted(self._changed):
            worker = workers[worker_id]
            if worker.alive:
                update(
                    WorkerView(worker.info, worker.load(), math.inf, 0, 0, worker.waiting_tokens)
                )
        self._changed.clear()
        return self._order.shortlist(query, matches, self._events.now(), SILENT_AFTER_S)

    def note_route(self, request_id: RequestId, plan: RoutePlan) -> None:
        """Counts a plan as load until its workers report it."""
        self._num_routes += 1
        if self._report_interval_s:
            self._routed[request_id] = plan
            self._count(plan, 1)

    def withdraw(self, request_id: RequestId) -> None:
        """Its last plan counts no more: it asks again, and goes somewhere else."""
        plan = self._routed.pop(request_id, None)
        if plan is not None:
            self._count(plan, -1)

    def _count(self, plan: RoutePlan, change: int) -> None:
        first = plan.prefill[0]
        second = first if plan.placement is Placement.AGGREGATED else plan.decode[0]
        for candidate, prefill, decode in ((first, change, 0), (second, 0, change)):
            seen = self._views.get(candidate.worker_id)
            if seen is None or seen.info.incarnation != candidate.incarnation:
                continue  # gone, or in another life
            self._views[candidate.worker_id] = dataclasses.replace(
                seen,
                prefill_in_flight=seen.prefill_in_flight + prefill,
                decode_in_flight=seen.decode_in_flight + decode,
            )
            self._changed.add(candidate.worker_id)
        self._view = None

    @property
    def message_s(self) -> float:
        """Time of a control message now."""
        latency = self._profile.links.latency_s
        return latency if self.host is None else latency * self.host.message_stretch

    def link(self, source: SimWorker, target: SimWorker) -> SharedLink:
        """The link that KV between two workers takes."""
        if source.info.cluster != target.info.cluster:
            return self.between
        return self._own_links[source.info.worker_id]

    def living(self) -> list[SimWorker]:
        """Workers that are up."""
        return [worker for worker in self.workers.values() if worker.alive]


def _info(name: WorkerId, group: WorkerGroup, device: Device) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        incarnation=1,
        role=group.role,
        cluster=group.cluster,
        control_endpoint=_NOWHERE,
        data_endpoint=_NOWHERE,
        model=MODEL,
        layout=_LAYOUT,
        max_model_len=device.num_blocks * TRACE_BLOCK,
        prefill_slots=device.prefill_slots,
        decode_slots=device.decode_slots,
        num_blocks=device.num_blocks,
    )
