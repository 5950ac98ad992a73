"""Lets workers of a group connect to each other before requests need it, and holds back the others.

Each worker is told the peers to which it may have to send KV, connects to them, and reports the
results; `policy/peer_checks.py` chooses the pairs and decides which workers serve. Every scheduler
does so by itself: after a restart, workers report again what they reached.
Tests: tests/unit/scheduler/test_peers.py, tests/e2e/test_connecting_groups.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, NamedTuple

from kvmesh.core.clock import Clock
from kvmesh.core.peers import Peer, PeerReport
from kvmesh.core.turns import Parts, at_once, in_turns, is_turn_over, rest_s
from kvmesh.core.types import HostRoute, Role, WorkerId, WorkerInfo
from kvmesh.policy.groups import GroupKey
from kvmesh.policy.peer_checks import (
    PAIRS_IN_A_TURN,
    CheckState,
    Pair,
    Party,
    admit,
    pairs_to_check,
)
from kvmesh.rpc.convert_peers import peers_to_proto
from kvmesh.telemetry.logs import event_logger
from kvmesh.v1.scheduler_service_pb2 import RegisterWorkerResponse
from services.scheduler import metrics
from services.scheduler.decisions import DecisionLog
from services.scheduler.feed import FleetFeed
from services.scheduler.fleet import Fleet
from services.scheduler.member import Standing

log = event_logger(__name__)

PATIENCE_S = 10.0
"""Seconds after which a worker that has not reported on a peer counts as unable to reach it."""

REPEAT_S = 2.0
"""Seconds after which the scheduler names its peers to a silent worker again.

The worker then repeats its report, so a lost message does not hold it back.
"""

LOOK_S = 0.5
"""Seconds between two looks while a check is awaited."""

GATHER_S = 0.01
"""Seconds in which news share one look."""

SMALL = 64
"""Maximum number of workers of a fleet that is looked at in the moment that a worker arrives.

Their pairs are one part (`PAIRS_IN_A_TURN`).
"""

Order = Callable[[WorkerId, RegisterWorkerResponse], bool]
"""Sends a message to a worker. False if it is not connected here."""

_COUNTERPARTS = {
    Role.PREFILL: (Role.DECODE, Role.HYBRID),
    Role.DECODE: (Role.PREFILL, Role.HYBRID),
    Role.HYBRID: (Role.PREFILL, Role.DECODE),
    Role.SPARE: (),
}


_CheckKey = tuple[Pair, int, int]
"""A pair and the incarnations of both workers."""


class _Told(NamedTuple):
    """What a worker reported in one of its lives; `results` are the problems of tried peers."""

    incarnation: int
    host_route: HostRoute | None
    results: Mapping[tuple[WorkerId, int], str]


class _Named(NamedTuple):
    """The peers that a worker was told last, in which session, and when."""

    session: int
    peers: tuple[Peer, ...]
    at: float


class Peers:
    """The connections between workers of the same group.

    Args:
        order: sends a message to a worker.
        decisions: shows which workers are held back.
    """

    def __init__(
        self, fleet: Fleet, feed: FleetFeed, order: Order, decisions: DecisionLog, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._feed = feed
        self._order = order
        self._decisions = decisions
        self._clock = clock
        self._told: dict[WorkerId, _Told] = {}
        self._named: dict[WorkerId, _Named] = {}
        self._asked_at: dict[_CheckKey, float] = {}
        self._states: dict[Pair, CheckState] = {}
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Looks at the fleet when a worker arrives, leaves or reports a result, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_fleet())
            while True:
                began = self._clock.now()
                self._news.clear()
                is_awaited = await in_turns(self.looking())
                await asyncio.sleep(rest_s(GATHER_S, self._clock.now() - began))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S if is_awaited else None):
                        await self._news.wait()

    async def _follow_fleet(self) -> None:
        while True:
            version = self._fleet.urgent_version
            self._news.set()
            await self._feed.wait_urgent_past(version)

    def note(self, info: WorkerInfo, report: PeerReport) -> None:
        """Takes a worker's report, which replaces its last one."""
        results = {(each.worker_id, each.incarnation): each.problem for each in report.checks}
        self._told[info.worker_id] = _Told(info.incarnation, report.host_route, results)
        self._news.set()

    def waits(self, info: WorkerInfo) -> bool:
        """Whether a worker that registers now must be connected to peers before it serves."""
        counts = self._fleet.count_by_group()
        group = GroupKey.of(info)
        return any(counts.get((group, role), 0) > 0 for role in _COUNTERPARTS[info.role])

    def arrived(self, info: WorkerInfo, report: PeerReport) -> None:
        """Takes the report with which a worker registers.

        It looks at a small fleet at once, so that a connected worker is not held for a moment.
        """
        self.note(info, report)
        if len(self._fleet) <= SMALL:
            self.look()

    def look(self) -> bool:
        """Names peers to workers and holds workers back. Returns whether a check is awaited."""
        return at_once(self.looking())

    def looking(self) -> Parts[bool]:
        """`look` in parts. A small fleet is looked at in one part."""
        here = {each.info.worker_id: each for each in self._fleet.standings()}
        for name in self._told.keys() - here.keys():
            del self._told[name]
        states: dict[Pair, CheckState] = {}
        keys: set[_CheckKey] = set()
        holds: dict[WorkerId, str] = {}
        for group in _groups(here.values()):
            parties = [Party(each.info.worker_id, each.info.role, each.serves) for each in group]
            mine: dict[Pair, CheckState] = {}
            for number, pair in enumerate((yield from pairs_to_check(parties))):
                if is_turn_over(number, PAIRS_IN_A_TURN):
                    yield
                key = _key(pair, here)
                keys.add(key)
                mine[pair] = self._state(pair, key, here)
            states |= mine
            # Nobody waits for a worker that is ejected or leaves.
            staying = [each for each in parties if not here[each.name].is_out]
            admission = yield from admit(staying, mine)
            holds |= dict.fromkeys(admission.waiting, "")
            holds |= {
                name: self._reason(name, pairs, here) for name, pairs in admission.failed.items()
            }
        self._states = states
        unreported = keys & self._asked_at.keys()
        self._asked_at = {key: at for key, at in self._asked_at.items() if key in unreported}
        yield from self._name_peers(states, here, {sender for (sender, _), *_ in unreported})
        self._hold(holds)
        return bool(unreported) or CheckState.PENDING in states.values()

    def _state(self, pair: Pair, key: _CheckKey, here: Mapping[WorkerId, Standing]) -> CheckState:
        sender, receiver = (here[name] for name in pair)
        told = self._told.get(sender.info.worker_id)
        if told is None or told.incarnation != sender.info.incarnation:
            # Nothing is known of a remembered worker; one of an older version cannot check.
            return CheckState.VERIFIED if sender.is_here else CheckState.PENDING
        problem = told.results.get((receiver.info.worker_id, receiver.info.incarnation))
        if problem is not None:
            self._asked_at.pop(key, None)
            return CheckState.FAILED if problem else CheckState.VERIFIED
        now = self._clock.now()
        asked_at = self._asked_at.setdefault(key, now)
        return CheckState.PENDING if now < asked_at + PATIENCE_S else CheckState.FAILED

    def _reason(
        self, name: WorkerId, pairs: tuple[Pair, ...], here: Mapping[WorkerId, Standing]
    ) -> str:
        """Why a worker is held back, by the first of the pairs that failed."""
        (sender, receiver), more = min(pairs), len(pairs) - 1
        info = here[receiver].info
        problem = self._told[sender].results.get((receiver, info.incarnation))
        problem = problem or f"it did not report within {PATIENCE_S:g} s"
        words = (
            f"it cannot send KV to {receiver}"
            if sender == name
            else f"{sender} cannot send KV to it"
        )
        others = f" (and {more} more pairs)" if more else ""
        return f"{words}: {problem}{others}"

    def _name_peers(
        self, pairs: Iterable[Pair], here: Mapping[WorkerId, Standing], silent: Set[WorkerId]
    ) -> Parts[None]:
        """Tells workers their peers, if these are others than before; `silent` ones repeatedly."""
        wanted: dict[WorkerId, list[WorkerId]] = {}
        for number, (sender, receiver) in enumerate(pairs):
            if is_turn_over(number, PAIRS_IN_A_TURN):
                yield
            if sender in self._told and here[sender].is_here and here[receiver].is_here:
                wanted.setdefault(sender, []).append(receiver)
        for name in self._named.keys() - here.keys():
            del self._named[name]
        for number, name in enumerate(self._named.keys() | wanted.keys()):
            if is_turn_over(number):
                yield
            receivers = sorted(wanted.get(name, ()))
            peers = tuple(self._peer(here[receiver].info) for receiver in receivers)
            session, now = here[name].session, self._clock.now()
            last = self._named.get(name, _Named(session, (), now))
            is_silent = name in silent and now >= last.at + REPEAT_S
            if (last.session, last.peers) == (session, peers) and not is_silent:
                continue
            if self._order(name, RegisterWorkerResponse(peers=peers_to_proto(peers))):
                self._named[name] = _Named(session, peers, now)

    def _peer(self, info: WorkerInfo) -> Peer:
        told = self._told.get(info.worker_id)
        is_known = told is not None and told.incarnation == info.incarnation
        route = told.host_route if told is not None and is_known else None
        return Peer(info.worker_id, info.incarnation, info.data_endpoint, route)

    def _hold(self, holds: Mapping[WorkerId, str]) -> None:
        failed = sum(bool(reason) for reason in holds.values())
        metrics.CONNECTING_WORKERS.labels("failed").set(failed)
        metrics.CONNECTING_WORKERS.labels("pending").set(len(holds) - failed)
        before = self._fleet.held
        if not self._fleet.hold(holds):
            return
        for name in holds.keys() | before.keys():
            now, told = holds.get(name), before.get(name)
            if now != told and (now or (told and now is None)):
                self._note(name, now)
        self._feed.changed()

    def _note(self, name: WorkerId, reason: str | None) -> None:
        """Notes that a worker cannot be connected, or can be again."""
        if reason:
            log.warning("worker_not_connected", worker_id=name, problem=reason)
        else:
            log.info("worker_connected", worker_id=name)
        self._decisions.add_fleet(
            "peers", "not_connected" if reason else "connected", worker_id=name, why=reason or ""
        )

    def shown(self, _query: Mapping[str, str]) -> dict[str, Any]:
        """GET /debug/peers: the pairs by state, and the workers that are held back."""
        by_state: dict[str, list[str]] = {state.value: [] for state in CheckState}
        for (sender, receiver), state in sorted(self._states.items()):
            by_state[state.value].append(f"{sender} > {receiver}")
        return {"pairs": by_state, "held": self._fleet.held}


def _groups(standings: Iterable[Standing]) -> list[list[Standing]]:
    """The members of each group, and the spares that may join it."""
    members: dict[GroupKey, list[Standing]] = {}
    spares: dict[tuple[str, str, str], list[Standing]] = {}
    for each in standings:
        key = GroupKey.of(each.info)
        if each.info.role is Role.SPARE:
            spares.setdefault((key.model, key.fingerprint, key.cluster), []).append(each)
        else:
            members.setdefault(key, []).append(each)
    return [
        [*its, *spares.get((key.model, key.fingerprint, key.cluster), [])]
        for key, its in members.items()
    ]


def _key(pair: Pair, here: Mapping[WorkerId, Standing]) -> _CheckKey:
    sender, receiver = (here[name].info.incarnation for name in pair)
    return pair, sender, receiver
