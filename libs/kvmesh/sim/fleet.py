"""The workers of a simulation, the views that routes get of them, and the links between them.

Tests: tests/unit/sim/test_fleet.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

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
from kvmesh.sim.worker import SimWorker
from kvmesh.sim.worker_listener import WorkerListener
from kvmesh.sim.worker_rules import WorkerRules

MODEL = "simulated"
REMOTE = "remote"
"""Name of the offload cluster."""

LOST_AFTER_S = 3.0
"""Seconds for which a dead worker stays in the view: the length of its lease."""

_LAYOUT = KvLayout("simulated", "bfloat16", TRACE_BLOCK, 32, 1, 1)
_NOWHERE = Endpoint("simulated", 0)


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Identical workers."""

    cluster: str
    device: str
    role: Role
    count: int


def parse_fleet(text: str) -> tuple[WorkerGroup, ...]:
    """Parses `CLUSTER:DEVICE:ROLE:COUNT,...`.

    Raises:
        ConfigError: an entry is wrong.
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
    """Workers by id, with the view that decisions read.

    Args:
        report_interval_s: seconds between two load reports; 0 shows loads without delay.
        order: index for fleets that are too large to look at whole.
        grouped: whether each cluster is the P/D group of the scenario with its name.

    Attributes:
        num_changes: counter that grows whenever a worker's load, cache or role changes.
        openings: counter that grows whenever a worker may accept a request that it refused before.
        host: the host that all workers share; None if each has its own.
        between: the link out of the remote cluster.
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
        self.num_changes = 0
        self.openings = 0
        self.index = PrefixIndex()
        self._views: dict[WorkerId, WorkerView] = {}
        self._changed: set[WorkerId] = set()
        self._view: FleetView | None = None
        self._next_report = 0.0
        self._num_routes = 0
        self._routed: dict[RequestId, RoutePlan] = {}  # since the last report
        self._own_links: dict[WorkerId, SharedLink] = {}
        self._leaving: dict[str, SharedLink] = {}
        self.between = self._egress(REMOTE)

    def build(self, groups: tuple[WorkerGroup, ...]) -> None:
        """Starts all workers of the groups.

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
            self._profile.token_bytes * TRACE_BLOCK,
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
        self.num_changes += 1
        self.openings += 1

    def restart(self, worker_id: WorkerId) -> None:
        """Restarts a dead worker with empty caches."""
        dead = self.workers[worker_id]
        if not dead.alive:
            self._start(
                dataclasses.replace(dead.info, incarnation=dead.info.incarnation + 1), dead.device
            )

    def forget(self, dead: SimWorker) -> None:
        """Removes a dead worker from the index now, and from the view when its lease ends."""
        self.index.remove(dead.info.worker_id)
        self._events.after(LOST_AFTER_S, lambda: self._expire(dead))

    def _expire(self, dead: SimWorker) -> None:
        if self.workers[dead.info.worker_id] is dead:
            del self._views[dead.info.worker_id]
            if self._order is not None:
                self._order.remove(dead.info.worker_id)
            self._view = None
            self.num_changes += 1

    def note_change(self, worker: SimWorker) -> None:
        """Records that a worker's load or cache has changed."""
        self.num_changes += 1
        self._changed.add(worker.info.worker_id)
        self.index.note_change(worker.info.worker_id)

    def view(self) -> FleetView:
        """Returns the fleet as a decision sees it now."""
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
        return FleetView(self._view.workers, num_routes=self._num_routes)

    def view_for(self, query: RouteQuery, matches: Mapping[WorkerId, int]) -> FleetView:
        """Returns the fleet as a route for this query sees it; of a large fleet only a
        shortlist.
        """
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
        """Removes the load of a request's last plan, because the request asks for another."""
        plan = self._routed.pop(request_id, None)
        if plan is not None:
            self._count(plan, -1)

    def _count(self, plan: RoutePlan, change: int) -> None:
        first = plan.prefill[0]
        second = first if plan.placement is Placement.AGGREGATED else plan.decode[0]
        for candidate, prefill, decode in ((first, change, 0), (second, 0, change)):
            seen = self._views.get(candidate.worker_id)
            if seen is None or seen.info.incarnation != candidate.incarnation:
                continue  # gone, or another incarnation
            self._views[candidate.worker_id] = dataclasses.replace(
                seen,
                prefill_in_flight=seen.prefill_in_flight + prefill,
                decode_in_flight=seen.decode_in_flight + decode,
            )
            self._changed.add(candidate.worker_id)
        self._view = None
        self.num_changes += 1

    @property
    def message_s(self) -> float:
        """Seconds that a control message takes now."""
        latency = self._profile.links.latency_s
        return latency if self.host is None else latency * self.host.message_stretch

    def link(self, source: SimWorker, target: SimWorker) -> SharedLink:
        """Returns the link that carries KV between two workers."""
        if source.info.cluster != target.info.cluster:
            return self._egress(source.info.cluster)
        return self._own_links[source.info.worker_id]

    def between_token_s(self) -> dict[tuple[str, str], float]:
        """Returns the seconds that a token's KV travels from one cluster to another alone."""
        clusters = sorted({each.info.cluster for each in self.workers.values()})
        token_bytes = self._profile.token_bytes
        return {
            ends: token_bytes / self._egress(ends[0]).bytes_per_s
            for ends in permutations(clusters, 2)
        }

    def _egress(self, cluster: str) -> SharedLink:
        """Returns the link out of a cluster: the directions between two do not share bandwidth."""
        if cluster not in self._leaving:
            speed = self._profile.links.between_bytes_per_s
            self._leaving[cluster] = SharedLink(self._events, speed)
        return self._leaving[cluster]

    def living(self) -> list[SimWorker]:
        """Returns the workers that are alive."""
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
