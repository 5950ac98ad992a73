"""Levels of faults: which workers are tried last, drained or given up, from what they report and
from what gateways lost there. Pure.

A worker is compared with itself, with the others of its machine and with those of its cluster: an
engine that was always slow is not ill, and neither is one on a machine on which all are slow. At
most a share of a cluster is ejected at a time, and never the last worker of a role of a group. One
that was ejected comes back after a rest, is tried last for a while, and rests twice as long if it
fails again.
Source: P/D-Serve 3.4 names levels and detection and leaves both open. Tests:
tests/unit/policy/test_health.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmesh.core.health import Health
from kvmesh.core.turns import WORKERS_IN_A_TURN, Parts
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.groups import GroupKey

HANG_S = 1.5
HANG_FACTOR = 10.0
"""A step hangs after this long, and this often as long as steps like it have taken."""

UNKNOWN_STEP_S = 60.0
"""A step of a kind that never ran before hangs after this long: it may be compiled first."""

SUSPECT_SHARE = 0.5
"""Of what makes a worker hang or slow, makes it suspect."""

SLOW_FACTOR = 6.0
"""A worker is slow if its steps take this often as long as usual."""

PEER_FACTOR = 2.0
"""And this often as long, beside usual, as those of the others of its cluster."""

MOST_CROWDED = 8.0
"""A machine's other workers excuse no more: where all of them fail, each is ill."""

LOST_WINDOW_S = 5.0
MIN_LOST = 3
"""Requests that gateways lost at a worker in the window."""

MIN_DAMAGED = 2
"""Sequences in the window whose logits were not numbers: one may be the request's fault."""

MIN_REFUSED = 5
"""Requests in the window that a worker refused while it stood idle."""

IDLE_S = 1.0
"""A worker that refuses was idle for so long before, and stays idle for so long after: nothing that
it held is why it refuses, and no report is under way that says what it had just taken."""

EJECTED_SHARE = 0.25
"""Of a cluster's workers are ejected at a time, one at least."""

REST_S = 10.0
MAX_REST_S = 320.0
PROBATION_S = 10.0


class HealthReason(enum.Enum):
    """What is wrong with a worker."""

    FINE = "nothing is wrong"
    HANGS = "its step does not end"
    SLOW = "its steps take much longer than they did"
    LOSES = "gateways lose requests there"
    DAMAGED = "it computes logits that are not numbers"
    REFUSES = "it refuses requests while it has nothing to do"
    RESTS = "it was ejected a short while ago"
    PROBATION = "it came back a short while ago"
    BUDGET = "too many of its cluster are ejected"
    LAST = "it is the last of its role"


_FATAL = {HealthReason.HANGS: Health.DEAD}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a worker.

    Attributes:
        fault: what is wrong, also where it stays for another reason.
    """

    level: Health = Health.OK
    reason: HealthReason = HealthReason.FINE
    fault: HealthReason = HealthReason.FINE

    @property
    def hangs(self) -> bool:
        """Whether its step does not end, also where it stays a member all the same."""
        stays = self.reason in (HealthReason.LAST, HealthReason.BUDGET)
        return self.level is Health.DEAD or (stays and self.fault is HealthReason.HANGS)

    @property
    def is_ill(self) -> bool:
        """Whether somebody else is to have its place: it was ejected, or hangs and is the last."""
        is_last = self.reason is HealthReason.LAST
        return self.level >= Health.DEGRADED or (is_last and self.hangs)


FINE = Verdict()


@dataclass(slots=True)
class _Record:
    """One life of one worker."""

    incarnation: int
    lost: deque[float] = field(default_factory=deque)
    refused: deque[float] = field(default_factory=deque)
    damaged: deque[float] = field(default_factory=deque)
    last: WorkerLoad = WorkerLoad()
    idle_since: float | None = None
    ejected_at: float | None = None
    rest_s: float = REST_S
    back_at: float | None = None
    verdict: Verdict = FINE

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong there in the window."""
        return bool(self.lost or self.refused or self.damaged)

    def is_fine_with(self, load: WorkerLoad) -> bool:
        """Whether nothing can be wrong, whatever the others do: so it is with almost all workers.

        All of a large fleet are judged while routes wait.
        """
        return (
            load.slowdown < SUSPECT_SHARE * SLOW_FACTOR
            and load.step_age_s < SUSPECT_SHARE * HANG_S
            and not self.has_failed
            and self.ejected_at is None
            and self.back_at is None
        )

    def take(self, load: WorkerLoad, now: float) -> None:
        """Takes a report in."""
        if load is self.last and self.idle_since is not None and not self.has_failed:
            return  # it has told nothing new, and stood idle before
        for _ in range(min(load.damaged_total - self.last.damaged_total, MIN_DAMAGED)):
            self.damaged.append(now)
        if not _stands_idle(load, self.last):
            self.idle_since = None
            self.refused.clear()
        elif self.idle_since is None:
            self.idle_since = now
        self.last = load
        for times in (self.lost, self.refused, self.damaged):
            _drop_before(times, now - LOST_WINDOW_S)


class HealthBoard:
    """What is known of each worker. Every `now` is on one clock that never goes back."""

    def __init__(self) -> None:
        self._records: dict[WorkerId, _Record] = {}

    def note_lost(self, worker_id: WorkerId, now: float) -> None:
        """A gateway lost a request there, for the first time for that request."""
        record = self._records.get(worker_id)
        if record is not None:
            record.lost.append(now)

    def note_refused(self, worker_id: WorkerId, now: float) -> None:
        """It refused a request of a gateway, for the first time that request."""
        record = self._records.get(worker_id)
        since = None if record is None else record.idle_since
        if record is not None and since is not None and now >= since + IDLE_S:
            record.refused.append(now)

    def verdicts(
        self, workers: Sequence[tuple[WorkerInfo, WorkerLoad]], now: float
    ) -> Parts[dict[WorkerId, Verdict]]:
        """What becomes of each worker now.

        Args:
            workers: all live ones, with their loads as they were reported.
        """
        found: dict[WorkerId, Verdict] = {}
        clusters: set[str] = set()
        for number, (info, load) in enumerate(workers):
            if number % WORKERS_IN_A_TURN == WORKERS_IN_A_TURN - 1:
                yield
            record = self._record(info)
            record.take(load, now)
            if record.is_fine_with(load):
                found[info.worker_id] = record.verdict = FINE
            else:
                clusters.add(info.cluster)
        if len(self._records) > len(workers):
            names = {info.worker_id for info, _ in workers}
            self._records = {name: each for name, each in self._records.items() if name in names}
        for cluster in clusters:
            found |= self._of_cluster([each for each in workers if each[0].cluster == cluster], now)
        return found

    def _of_cluster(
        self, members: Sequence[tuple[WorkerInfo, WorkerLoad]], now: float
    ) -> dict[WorkerId, Verdict]:
        """Of those members that may not be fine."""
        budget = max(1, int(EJECTED_SHARE * len(members)))
        slowdowns = sorted(load.slowdown for _, load in members if load.slowdown > 0)
        machines: dict[str, list[float]] = {}
        for info, load in members:
            if (late := _lateness(load)) > 0:
                insort(machines.setdefault(info.control_endpoint.host, []), late)
        awake = [(info, self._record(info)) for info, load in members if not load.draining]
        judged = [each for each in members if not self._record(each[0]).is_fine_with(each[1])]
        # Who is out stays out first: places go to others once its rest is over.
        judged.sort(key=lambda each: self._record(each[0]).ejected_at is None)
        for info, load in judged:
            record = self._record(info)
            beside = machines.get(info.control_endpoint.host, [])
            crowd = min(_usual(_lateness(load), beside), MOST_CROWDED)
            fault, share = self._fault(record, load, crowd, slowdowns, now)
            record.verdict = self._judged(record, fault, share, now)
            if record.verdict.level < Health.DEGRADED:
                record.ejected_at = None
                continue
            if record.ejected_at is None and not load.draining:
                others = [each for each in awake if each[0].worker_id != info.worker_id]
                stays = _must_stay(info, others)
                if stays or budget <= 0:
                    why = HealthReason.LAST if stays else HealthReason.BUDGET
                    record.verdict = Verdict(Health.SUSPECT, why, fault)
                    continue
                record.ejected_at = now
            budget -= 1
        return {info.worker_id: self._record(info).verdict for info, _ in judged}

    def _judged(self, record: _Record, fault: HealthReason, share: float, now: float) -> Verdict:
        if share >= 1.0:
            if record.back_at is not None and record.ejected_at is None:
                record.rest_s = min(2 * record.rest_s, MAX_REST_S)
            record.back_at = None
            return Verdict(_FATAL.get(fault, Health.DEGRADED), fault, fault)
        if record.ejected_at is not None:
            if now < record.ejected_at + record.rest_s:
                return Verdict(Health.DEGRADED, HealthReason.RESTS, record.verdict.fault)
            record.back_at = now
        if record.back_at is not None and now < record.back_at + PROBATION_S:
            return Verdict(Health.SUSPECT, HealthReason.PROBATION, record.verdict.fault)
        if share >= SUSPECT_SHARE:
            return Verdict(Health.SUSPECT, fault, fault)
        return FINE

    def _fault(
        self,
        record: _Record,
        load: WorkerLoad,
        crowd: float,
        slowdowns: Sequence[float],
        now: float,
    ) -> tuple[HealthReason, float]:
        """What is most wrong, and how much; 1 ejects.

        Args:
            crowd: how late the steps of its machine's other workers are now.
            slowdowns: of all workers of the cluster that tell theirs, sorted.
        """
        shares = {
            HealthReason.HANGS: load.step_age_s / _hang_s(load, crowd),
            HealthReason.SLOW: _slowness(load.slowdown, crowd, slowdowns),
            HealthReason.LOSES: len(record.lost) / MIN_LOST,
            HealthReason.DAMAGED: len(record.damaged) / MIN_DAMAGED,
            HealthReason.REFUSES: sum(at <= now - IDLE_S for at in record.refused) / MIN_REFUSED,
        }
        # One that is fatal comes before one that is larger.
        fault = max(shares, key=lambda each: (shares[each] >= 1 and each in _FATAL, shares[each]))
        return fault, shares[fault]

    def _record(self, info: WorkerInfo) -> _Record:
        record = self._records.get(info.worker_id)
        if record is None or record.incarnation != info.incarnation:
            record = self._records[info.worker_id] = _Record(info.incarnation)
        return record


def _stands_idle(load: WorkerLoad, before: WorkerLoad) -> bool:
    """Whether a worker that takes requests holds none, and has computed nothing since before."""
    held = load.prefill_active + load.decode_running + load.decode_reserved + load.decode_preempted
    totals = (load.prefill_tokens_total, load.decode_tokens_total)
    same = totals == (before.prefill_tokens_total, before.decode_tokens_total)
    return same and not (held or load.pending_tokens or load.draining)


def _hang_s(load: WorkerLoad, crowd: float) -> float:
    if not load.step_expected_s:
        return UNKNOWN_STEP_S
    # What stops all workers of a machine for a moment is no fault of one.
    return max(HANG_S, HANG_FACTOR * load.step_expected_s) * max(1.0, crowd / PEER_FACTOR)


def _slowness(slowdown: float, crowd: float, slowdowns: Sequence[float]) -> float:
    usual = max(_usual(slowdown, slowdowns), crowd)
    return slowdown / max(SLOW_FACTOR, PEER_FACTOR * usual)


def _usual(own: float, all_of_them: Sequence[float]) -> float:
    """The median of the others.

    Args:
        all_of_them: sorted; itself is among them, unless it is 0, which is not known.
    """
    others, place = len(all_of_them) - (own > 0), bisect_left(all_of_them, own)
    if others < 1:
        return 1.0
    middle = others // 2
    return all_of_them[middle + (own > 0 and middle >= place)]


def _lateness(load: WorkerLoad) -> float:
    """How much longer its steps take than they did, the running one included; 0: not known."""
    running = load.step_age_s / load.step_expected_s if load.step_expected_s else 0.0
    return max(load.slowdown, running)


def _must_stay(info: WorkerInfo, others: Iterable[tuple[WorkerInfo, _Record]]) -> bool:
    """Whether no other worker of its group that is not ejected could do its part."""
    group = GroupKey.of(info)
    roles = {
        other.role
        for other, record in others
        if record.ejected_at is None and GroupKey.of(other) == group
    }
    if Role.HYBRID in roles:
        return False
    if info.role is Role.HYBRID:
        return not {Role.PREFILL, Role.DECODE} <= roles
    return info.role not in roles


def _drop_before(times: deque[float], moment: float) -> None:
    while times and times[0] <= moment:
        times.popleft()
