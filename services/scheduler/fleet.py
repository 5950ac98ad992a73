"""The fleet as the scheduler knows it: members, loads, leases, and plans not in the loads yet.

Bookkeeping without I/O or clock. Tests: tests/unit/scheduler/test_fleet.py.
"""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from kvmesh.core.adapters import lacking
from kvmesh.core.details import FleetWorker, WorkerDetail
from kvmesh.core.health import Health
from kvmesh.core.slots import PrefixMatch
from kvmesh.core.types import (
    Placement,
    Refusal,
    RefusalReason,
    RequestId,
    Role,
    RoutePlan,
    RouteQuery,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)
from kvmesh.policy.fleet_index import SMALL_FLEET, FleetIndex
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.health import Verdict
from kvmesh.policy.holders import HeldBlocks, Lower
from kvmesh.policy.seats import SILENT_AFTER_S
from kvmesh.policy.view import FleetView
from kvmesh.transfer.layouts import layout_words
from services.scheduler.fleet_changes import FleetChange, FleetChanges
from services.scheduler.group_layouts import GroupLayouts
from services.scheduler.member import (
    NONE_TAKEN,
    RESTORED,
    Member,
    Routed,
    Standing,
    Taken,
    is_same_place,
    view_of,
    worker_of,
)

IN_FLIGHT_S = 0.5
"""Seconds that a plan counts as load of its workers, unless a later report shows it."""

SETTLE_S = 0.05
"""Seconds from a plan until it no longer counts beside a report, if no worker tells that it took
the request: it was refused or lost, or the worker is of an older version."""

MAX_GONE = 1024
"""Maximum number of remembered departures. A watcher further behind gets the whole fleet."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One registration of a worker. A later registration of the same worker ends it."""

    worker_id: WorkerId
    session: int


class Fleet:
    """Members by worker id, indexed by load so that a route does not scan all of them.

    Args:
        by_tokens: index order for policies that count waiting tokens, as the default policy does.

    Attributes:
        version: grows with every change.
        urgent_version: the version of the last change beyond a new load: a worker arrived, left or
            began to drain.
        on_life: called with a worker and its incarnation that is now a member; None if it left.
        closed: workers that get no new requests, as if they drained, whatever they report.
    """

    def __init__(self, lease_s: float, *, by_tokens: bool = True) -> None:
        self._lease_s = lease_s
        self._members: dict[WorkerId, Member] = {}
        # Its random numbers order workers of equal load; any fixed seed works.
        self._index = FleetIndex(random.Random(0), by_tokens=by_tokens)
        self._routed: OrderedDict[RequestId, Routed] = OrderedDict()  # oldest first
        self._counts = Counter[tuple[GroupKey, Role]]()
        self._layouts = GroupLayouts()
        self._fingerprints: dict[str, set[str]] = {}
        self._labels: dict[str, set[str]] = {}
        self._lacking: dict[tuple[str, str], frozenset[WorkerId]] = {}
        self._unwell: set[WorkerId] = set()  # a look at the ill must not scan the fleet
        self._last_session = RESTORED
        self._gone: deque[tuple[int, WorkerId]] = deque(maxlen=MAX_GONE)
        self._lost: deque[WorkerInfo] = deque(maxlen=MAX_GONE)
        self._num_routes = 0
        self.closed: frozenset[WorkerId] = frozenset()
        self.version = 0
        self.urgent_version = 0
        self.on_life: Callable[[WorkerId, int | None], None] = lambda _, __: None

    def __len__(self) -> int:
        return len(self._members)

    def trust(self, patience_s: float) -> None:
        """Lets all reports be so many seconds later than in a small fleet."""
        self._index.patience_s = patience_s

    def register(
        self, info: WorkerInfo, now: float, *, waits: bool = False
    ) -> Membership | Refusal:
        """Adds a worker. It replaces an older incarnation or connection of the same worker.

        Args:
            waits: whether a worker that is new in its group is held back at first.
        """
        if info.layout.block_size < 1 or info.num_blocks < 1:
            return Refusal(RefusalReason.INVALID, f"{info.worker_id} has no KV blocks")
        known = self._members.get(info.worker_id)
        if known is not None and known.info.incarnation > info.incarnation:
            return Refusal(
                RefusalReason.STALE,
                f"{info.worker_id} is known with incarnation {known.info.incarnation}, "
                f"newer than {info.incarnation}",
            )
        if (name := self._layouts.stranger(info)) is not None:
            stranger = self._members[name].info
            here, there = layout_words(info.layout), layout_words(stranger.layout)
            return Refusal(
                RefusalReason.INVALID,
                f"{info.worker_id} cannot exchange KV with {stranger.worker_id} of its group: its "
                f"layout is {here}; there it is {there}. Start all workers of a group with the "
                "same engine.block-size and engine, or give this one another worker.scenario or "
                "engine.model-name",
            )
        self._last_session += 1
        self._insert(info, self._last_session, reported_at=now, now=now, waits=waits)
        if known is not None and known.info.incarnation == info.incarnation:
            self._members[info.worker_id].detail = known.detail  # sent again only when it changes
        return Membership(info.worker_id, self._last_session)

    def restore(self, info: WorkerInfo, now: float) -> bool:
        """Adds a remembered worker until its lease ends. Returns False if it is already known."""
        if info.worker_id in self._members:
            return False
        self._insert(info, RESTORED, reported_at=-math.inf, now=now)
        return True

    def report(
        self, membership: Membership, load: WorkerLoad, now: float, taken: Taken = NONE_TAKEN
    ) -> bool:
        """Stores a load and renews the lease. Returns False if the membership is over.

        Args:
            taken: requests that the load shows for the first time.
        """
        member = self._current(membership)
        if member is None:
            return False
        self._take_over(taken, member)
        urgent = load.draining != member.load.draining
        changed = load != member.load
        member.load, member.reported = load, True
        member.reported_at = now
        member.expires_at = now + self._lease_s
        member.forget_routes_before(now - SETTLE_S)
        self._index.update(view_of(member))
        if changed:
            self._note_change(urgent=urgent)
            member.changed_at = self.version
        return True

    def _take_over(self, taken: Taken, by: Member) -> None:
        """Stops counting the plans of requests that a worker took, on their first candidates.

        Args:
            by: the worker, which may be another candidate; its place in the index is not updated.
        """
        for request_id in taken.prompts:
            if routed := self._routed.get(request_id):
                first = self._members.get(routed.prefill)
                if first is not None and first.forget_prompt(routed.at) and first is not by:
                    self._index.update(view_of(first))
        for request_id in taken.reservations:
            if routed := self._routed.get(request_id):
                first = self._members.get(routed.decode)
                if first is not None and first.forget_reservation(routed.at) and first is not by:
                    self._index.update(view_of(first))

    def confirm(self, membership: Membership, now: float) -> bool:
        """Like `report` with the last reported load."""
        member = self._current(membership)
        if member is None:
            return False
        num_routes = len(member.prefill_routes) + len(member.decode_routes)
        if num_routes or not member.reported:
            return self.report(membership, member.load, now)
        member.reported_at = now
        member.expires_at = now + self._lease_s
        self._index.heard(membership.worker_id, now)
        return True

    def judge(self, verdicts: Mapping[WorkerId, Verdict]) -> list[WorkerInfo]:
        """Stores the verdicts on workers. Returns the workers whose level or illness changed."""
        news: list[WorkerInfo] = []
        for name, verdict in verdicts.items():
            member = self._members.get(name)
            if member is None or member.verdict is verdict or member.verdict == verdict:
                continue
            before = member.verdict
            is_news = (before.level, before.is_ill) != (verdict.level, verdict.is_ill)
            member.verdict = verdict
            if verdict.level is Health.OK:
                self._unwell.discard(name)
            else:
                self._unwell.add(name)
            self._note_change(urgent=is_news)
            member.changed_at = self.version
            if is_news:
                news.append(member.info)
                self._index.update(view_of(member))
        return news

    def close(self, names: frozenset[WorkerId]) -> bool:
        """Closes exactly these workers for new requests. Returns whether that is a change."""
        if names == self.closed:
            return False
        for name in names ^ self.closed:
            member = self._members.get(name)
            if member is not None:
                member.closed = name in names
                self._note_change(urgent=True)
                member.changed_at = self.version
                self._index.update(view_of(member))
        self.closed = names
        return True

    def hold(self, names: Mapping[WorkerId, str]) -> bool:
        """Holds back exactly these workers, each for a reason. Returns whether that is a change.

        They get no new requests until they are connected to peers of their group.
        """
        is_change = False
        for name, member in self._members.items():
            reason = names.get(name)
            if reason == member.hold:
                continue
            is_change = True
            self._note_change(urgent=(reason is None) != (member.hold is None))
            member.hold, member.changed_at = reason, self.version
            self._index.update(view_of(member))
        return is_change

    @property
    def held(self) -> dict[WorkerId, str]:
        """The workers that `hold` names, with the reasons; empty while they are being checked."""
        members = self._members.items()
        return {name: each.hold for name, each in members if each.hold is not None}

    def standings(self) -> Iterator[Standing]:
        """How all members stand in their groups."""
        for each in self._members.values():
            is_out = each.load.draining or each.verdict.level >= Health.DEGRADED
            yield Standing(each.info, each.hold is None, each.session, is_out)

    def reports(self) -> list[tuple[WorkerInfo, WorkerLoad]]:
        """All members with their loads as reported."""
        return [(each.info, each.load) for each in self._members.values()]

    def silent(self, now: float) -> dict[WorkerId, float]:
        """Seconds since the last report, less the patience, of workers that were heard before."""
        due_at = now - self._index.patience_s
        heard = ((name, due_at - each.reported_at) for name, each in self._members.items())
        return {name: age for name, age in heard if SILENT_AFTER_S < age < math.inf}

    def note_detail(self, membership: Membership, detail: WorkerDetail) -> None:
        """Stores details for people. Does nothing if the membership is over."""
        member = self._current(membership)
        if member is not None and member.detail != detail:
            member.detail = detail
            self._note_change(urgent=False)
            member.changed_at = self.version

    def note_planned(self) -> None:
        """Marks a change of the plans for the fleet, so that watchers get a new view."""
        self._note_change(urgent=False)

    def leave(self, membership: Membership, *, is_lost: bool = False) -> bool:
        """Removes a worker. Returns False if the membership was already over.

        Args:
            is_lost: it left without a goodbye.
        """
        if self._current(membership) is None:
            return False
        self._remove(membership.worker_id, is_lost=is_lost)
        return True

    def expire(self, now: float) -> list[WorkerId]:
        """Removes the workers whose lease ended. Returns their names."""
        due_at = now - self._index.patience_s
        lost = [name for name, member in self._members.items() if member.expires_at <= due_at]
        for name in lost:
            self._remove(name, is_lost=True)
        return lost

    def ill(self) -> Iterator[WorkerInfo]:
        """Workers that were ejected and have not recovered, or the last of a role that hangs."""
        unwell = map(self._members.__getitem__, self._unwell)
        return (each.info for each in unwell if each.verdict.is_ill)

    def hanging(self) -> set[WorkerId]:
        """Workers whose step does not end, ejected or not."""
        return {name for name in self._unwell if self._members[name].verdict.hangs}

    def take_lost(self) -> list[WorkerInfo]:
        """Returns the workers that left without a goodbye since the last call."""
        lost, self._lost = list(self._lost), deque(maxlen=MAX_GONE)
        return lost

    def note_route(self, request_id: RequestId, plan: RoutePlan, now: float) -> None:
        """Counts a plan as load of its first candidates, until their reports show it."""
        self.withdraw(request_id)
        self._num_routes += 1
        prefill = plan.prefill[0].worker_id
        decode = prefill if plan.placement is Placement.AGGREGATED else plan.decode[0].worker_id
        self._members[prefill].prefill_routes.append(now)
        self._members[decode].decode_routes.append(now)
        self._routed[request_id] = Routed(now, prefill, decode)
        for name in dict.fromkeys((prefill, decode)):
            self._index.update(view_of(self._members[name]))

    def withdraw(self, request_id: RequestId) -> None:
        """Stops counting the last plan of a request that asks again."""
        routed = self._routed.pop(request_id, None)
        if routed is None:
            return
        for name in dict.fromkeys((routed.prefill, routed.decode)):
            member = self._members.get(name)
            if member is not None and member.forget_route(routed):
                self._index.update(view_of(member))

    def view(self, now: float) -> FleetView:
        """All members, for a decision at `now`."""
        self._land_routes(now)
        return self._index.view(self.version, self._num_routes)

    def view_for(
        self, query: RouteQuery, matches: Mapping[WorkerId, int] | None, now: float
    ) -> FleetView:
        """The members for a decision by load on this query.

        In a large fleet, only the relevant ones.
        """
        if len(self._members) <= SMALL_FLEET:
            return self.view(now)
        self._land_routes(now)
        return self._index.shortlist(query, matches, now, SILENT_AFTER_S)

    def current_matches(self, found: Iterable[PrefixMatch]) -> HeldBlocks:
        """Leading blocks by worker. Matches of a worker's earlier incarnations are dropped."""
        matches = HeldBlocks()
        for match in found:
            member = self._members.get(match.worker_id)
            if member is not None and member.info.incarnation == match.incarnation:
                lower = Lower(match.host_blocks, match.disk_blocks)
                matches.take(match.worker_id, match.num_blocks, lower)
        return matches

    def workers(self) -> tuple[FleetWorker, ...]:
        """All members, for watchers."""
        return tuple(worker_of(member) for member in self._members.values())

    def workers_in_parts(self, count: int) -> Iterator[list[FleetWorker]]:
        """Yields the present members, `count` at a time, in their state at that time."""
        members = iter(tuple(self._members.values()))
        while part := [worker_of(member) for member in islice(members, count)]:
            yield part

    def changes_since(self, version: int) -> FleetChanges | None:
        """Changes since a version; None if the version is too old."""
        if len(self._gone) == MAX_GONE and version < self._gone[0][0]:
            return None
        changed = (member for member in self._members.values() if member.changed_at > version)
        workers = (FleetChange(worker_of(member), member.came_at > version) for member in changed)
        gone = {name: None for at, name in self._gone if at > version}
        return FleetChanges(tuple(workers), tuple(gone.keys() - self._members.keys()))

    def confirmed(self) -> Iterator[WorkerInfo]:
        """Members that registered with this scheduler."""
        return (each.info for each in self._members.values() if each.session != RESTORED)

    def fingerprints(self, model: str) -> set[str]:
        """Fingerprints of the checkpoints that serve `model`: the namespaces of its blocks.

        Checkpoints whose workers publish no blocks are left out: nothing can be found there.
        """
        if model not in self._fingerprints:
            infos = (member.info for member in self._members.values())
            self._fingerprints[model] = {
                info.layout.model_fingerprint
                for info in infos
                if info.model == model and info.publishes
            }
        return self._fingerprints[model]

    def labels(self, model: str) -> set[str]:
        """Scenarios of the workers of `model`; "" for workers that serve any scenario."""
        if model not in self._labels:
            infos = (member.info for member in self._members.values())
            self._labels[model] = {info.scenario for info in infos if info.model == model}
        return self._labels[model]

    def lacking(self, model: str, adapter: str) -> frozenset[WorkerId]:
        """Workers of `model` that do not have a LoRA adapter, by its id."""
        if (model, adapter) not in self._lacking:
            infos = (member.info for member in self._members.values())
            self._lacking[model, adapter] = lacking(infos, model, adapter)
        return self._lacking[model, adapter]

    def count_by_group(self) -> dict[tuple[GroupKey, Role], int]:
        """Number of members of every group and role that was ever here."""
        return dict(self._counts)

    def _land_routes(self, now: float) -> None:
        """Stops counting plans that are older than `IN_FLIGHT_S`."""
        while self._routed:
            request_id, routed = next(iter(self._routed.items()))
            if routed.at > now - IN_FLIGHT_S:
                return
            self.withdraw(request_id)

    def _remove(self, worker_id: WorkerId, *, is_lost: bool) -> None:
        info = self._members.pop(worker_id).info
        self._unwell.discard(worker_id)
        self._counts[GroupKey.of(info), info.role] -= 1
        self._layouts.remove(info)
        if is_lost:
            self._lost.append(info)
        self._index.remove(worker_id)
        self.on_life(worker_id, None)
        self._note_change(urgent=True)
        self._gone.append((self.version, worker_id))

    def _insert(
        self,
        info: WorkerInfo,
        session: int,
        *,
        reported_at: float,
        now: float,
        waits: bool = False,
    ) -> None:
        before = self._members.get(info.worker_id)
        self._unwell.discard(info.worker_id)
        if before is not None:
            self._counts[GroupKey.of(before.info), before.info.role] -= 1
            self._layouts.remove(before.info)
        self._counts[GroupKey.of(info), info.role] += 1
        self._layouts.add(info)
        self._note_change(urgent=True)
        held = "" if waits else None
        member = self._members[info.worker_id] = Member(
            info=info,
            # Before its first report, a worker counts as idle and empty: it has just started.
            load=WorkerLoad(blocks_free=info.num_blocks),
            session=session,
            reported_at=reported_at,
            expires_at=now + self._lease_s,
            came_at=self.version,
            changed_at=self.version,
            closed=info.worker_id in self.closed,
            hold=before.hold if before is not None and is_same_place(before, info) else held,
        )
        self._index.update(view_of(member))
        self.on_life(info.worker_id, info.incarnation)

    def _current(self, membership: Membership) -> Member | None:
        member = self._members.get(membership.worker_id)
        return member if member is not None and member.session == membership.session else None

    def _note_change(self, *, urgent: bool) -> None:
        self.version += 1
        if urgent:
            self.urgent_version = self.version
            self._fingerprints.clear()
            self._labels.clear()
            self._lacking.clear()
