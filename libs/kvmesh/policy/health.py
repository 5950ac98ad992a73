"""Judges each worker's health from its reports and from the requests that gateways lost there.

The verdict says whether the scheduler tries the worker last, drains it or gives it up. Pure.

A worker is compared with its own past, with the other workers of its machine and with those of its
cluster: an engine that was always slow is not ill, and neither is one on a machine where all are
slow. At most a share of a cluster is ejected at a time, and never the last worker of a role of a
group. An ejected worker comes back after a rest and is tried last for a while. If it fails again,
it rests twice as long.
Source: P/D-Serve 3.4 names levels and detection and leaves both open. Tests:
tests/unit/policy/test_health.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvmesh.core.health import Health
from kvmesh.core.turns import Parts, is_turn_over
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.groups import GroupKey

HANG_S = 1.5
HANG_FACTOR = 10.0
"""A step hangs after `HANG_S` seconds, or after `HANG_FACTOR` times the usual time of similar steps
if that is longer."""

UNKNOWN_STEP_S = 60.0
"""Seconds after which a step of a kind that never ran before hangs: it may compile first."""

SUSPECT_SHARE = 0.5
"""Fraction of a fault's ejection threshold at which a worker becomes suspect."""

SLOW_FACTOR = 6.0
"""Slowdown over its own usual step times at which a worker is slow."""

PEER_FACTOR = 2.0
"""A slow worker's slowdown is also at least this many times the median of its cluster's others."""

MOST_CROWDED = 8.0
"""Largest slowdown of a machine's other workers that excuses a worker's own: where all of them
fail, each is ill."""

LOST_WINDOW_S = 5.0
MIN_LOST = 3
"""A worker that lost `MIN_LOST` requests of gateways within `LOST_WINDOW_S` seconds is ejected."""

UNANSWERED_S = 2.0
"""Seconds for which a worker is suspect after a gateway told that the worker does not answer. It is
not ejected for that: only the link to this gateway may be down."""

DAMAGED_WINDOW_S = 60.0
"""Window for damaged sequences. It is long: a worker that is tried last gets few requests."""

MIN_DAMAGED = 2
"""Number of sequences in that window with logits that are not numbers that ejects a worker."""

ALONE_S = 1.5
"""A single damaged sequence ejects its worker too, unless another worker of the cluster has one
within `ALONE_S` seconds. The sequence goes on elsewhere, and is damaged again there if its request
is the reason."""

MIN_DEVICE_ERRORS = 1
"""Number of uncorrectable errors of its device in that window that ejects a worker: a computation
may have read them."""

MIN_REFUSED = 5
"""Number of requests in the window that an idle worker refuses before it is ejected."""

IDLE_S = 1.0
"""Seconds that a worker is idle before and after a refusal that counts: its earlier work is not the
reason, and no report is under way that shows work it had just accepted."""

SILENT_S = 2.25
"""Seconds without a report after which a worker gets nothing new, until it reports again. Its lease
ends soon after. It is suspect from the moment that routes try it last, `SILENT_AFTER_S`."""

EJECTED_SHARE = 0.25
"""Largest fraction of a cluster's workers ejected at a time; one worker is always allowed."""

REST_S = 10.0
MAX_REST_S = 320.0
"""Seconds that a worker rests after its first ejection, and at most after repeated ones."""

PROBATION_S = 10.0
"""Seconds after its return in which a worker is tried last."""


class HealthReason(enum.Enum):
    """A worker's fault, or another reason for its health level."""

    FINE = "nothing is wrong"
    HANGS = "its step does not end"
    SLOW = "its steps take much longer than they did"
    LOSES = "gateways lose requests there"
    DAMAGED = "it computes logits that are not numbers"
    DEVICE = "its device reports errors that it cannot correct"
    DEVICE_LOST = "its device does not answer, or must be reset"
    REFUSES = "it refuses requests while it has nothing to do"
    UNANSWERED = "it does not answer a gateway"
    SILENT = "it does not report"
    RESTS = "it was ejected a short while ago"
    PROBATION = "it came back a short while ago"
    BUDGET = "too many of its cluster are ejected"
    LAST = "it is the last of its role"


_FATAL = {HealthReason.HANGS: Health.DEAD, HealthReason.DEVICE_LOST: Health.DEAD}
"""Faults with which a worker computes nothing more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A worker's health level and the reason for it.

    Attributes:
        reason: why the worker has this level.
        fault: the worker's own fault. It differs from `reason` where the worker keeps its place
            (`LAST`, `BUDGET`), or rests or is on probation after that fault.
    """

    level: Health = Health.OK
    reason: HealthReason = HealthReason.FINE
    fault: HealthReason = HealthReason.FINE

    @property
    def hangs(self) -> bool:
        """Whether the worker computes nothing more, even if it keeps its place.

        A step of it does not end, or its device is lost.
        """
        stays = self.reason in (HealthReason.LAST, HealthReason.BUDGET)
        return self.level is Health.DEAD or (stays and self.fault in _FATAL)

    @property
    def is_ill(self) -> bool:
        """Whether the worker needs a substitute.

        It was ejected, or is the last of its role and hangs. One that is silent may report again;
        it is replaced when its lease ends.
        """
        if self.fault is HealthReason.SILENT:
            return False
        is_last = self.reason is HealthReason.LAST
        return self.level >= Health.DEGRADED or (is_last and self.hangs)


FINE = Verdict()


@dataclass(slots=True)
class _Record:
    """Observations of one incarnation of a worker."""

    incarnation: int
    silent_s: float = 0.0
    lost: deque[float] = field(default_factory=deque)
    refused: deque[float] = field(default_factory=deque)
    damaged: deque[float] = field(default_factory=deque)
    device_errors: deque[float] = field(default_factory=deque)
    last: WorkerLoad = WorkerLoad()
    idle_since: float | None = None
    unanswered_at: float | None = None
    ejected_at: float | None = None
    rest_s: float = REST_S
    back_at: float | None = None
    verdict: Verdict = FINE

    def damages_alone(self, others: Sequence[float], now: float) -> bool:
        """Whether it damaged a sequence, and another worker has had the time to do so as well.

        Args:
            others: when other workers of the cluster damaged sequences.
        """
        return any(
            now >= at + ALONE_S and all(abs(at - other) > ALONE_S for other in others)
            for at in self.damaged
        )

    @property
    def has_failed(self) -> bool:
        """Whether it lost, refused or damaged a request, or its device failed, in the window."""
        return bool(self.lost or self.refused or self.damaged or self.device_errors)

    def is_fine_with(self, load: WorkerLoad) -> bool:
        """Whether the worker is healthy regardless of its peers, as almost all workers are.

        This check is cheap: routes wait while a large fleet is judged.
        """
        return (
            load.slowdown < SUSPECT_SHARE * SLOW_FACTOR
            and load.step_age_s < SUSPECT_SHARE * HANG_S
            and not (self.has_failed or self.silent_s or load.device.failing or load.device.lost)
            and self.ejected_at is None
            and self.back_at is None
            and self.unanswered_at is None
        )

    def take(self, load: WorkerLoad, now: float) -> None:
        """Records one load report, and drops observations older than the window."""
        if self.unanswered_at is not None and now >= self.unanswered_at + UNANSWERED_S:
            self.unanswered_at = None
        if load is self.last and self.idle_since is not None and not self.has_failed:
            return  # the report is not new, and the worker was idle before
        for _ in range(min(load.damaged_total - self.last.damaged_total, MIN_DAMAGED)):
            self.damaged.append(now)
        if load.device.errors_total > self.last.device.errors_total:
            self.device_errors.append(now)
        if not _stands_idle(load, self.last):
            self.idle_since = None
            self.refused.clear()
        elif self.idle_since is None:
            self.idle_since = now
        self.last = load
        for times in (self.lost, self.refused):
            _drop_before(times, now - LOST_WINDOW_S)
        for times in (self.damaged, self.device_errors):
            _drop_before(times, now - DAMAGED_WINDOW_S)


@dataclass(slots=True)
class _Peers:
    """The workers of a cluster, to compare one with the others.

    Attributes:
        slowdowns: of all that report one, sorted.
        lateness: `_lateness` of those with any, sorted, by machine.
        damaged: when sequences were damaged, and by which worker.
        able: number of workers that are not ejected and do not drain, by group and role.
        judged: those that `is_fine_with` does not clear.
    """

    slowdowns: list[float] = field(default_factory=list)
    lateness: dict[str, list[float]] = field(default_factory=dict)
    damaged: list[tuple[_Record, float]] = field(default_factory=list)
    able: Counter[tuple[GroupKey, Role]] = field(default_factory=Counter)
    judged: list[tuple[WorkerInfo, WorkerLoad, _Record]] = field(default_factory=list)


class HealthBoard:
    """Health records of all workers. Every `now` is on one monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[WorkerId, _Record] = {}

    def note_lost(self, worker_id: WorkerId, now: float) -> None:
        """Records that a gateway lost a request at the worker; called once per request."""
        record = self._records.get(worker_id)
        if record is not None:
            record.lost.append(now)

    def note_refused(self, worker_id: WorkerId, now: float) -> None:
        """Records that the worker refused a gateway's request; called once per request.

        It counts only if the worker was idle for `IDLE_S` seconds.
        """
        record = self._records.get(worker_id)
        since = None if record is None else record.idle_since
        if record is not None and since is not None and now >= since + IDLE_S:
            record.refused.append(now)

    def note_unanswered(self, worker_id: WorkerId, now: float) -> None:
        """Records that the worker does not answer a gateway."""
        record = self._records.get(worker_id)
        if record is not None:
            record.unanswered_at = now

    def verdicts(
        self,
        workers: Sequence[tuple[WorkerInfo, WorkerLoad]],
        now: float,
        silent: Mapping[WorkerId, float] = MappingProxyType({}),
    ) -> Parts[dict[WorkerId, Verdict]]:
        """Returns the verdict on each worker.

        Args:
            workers: all live workers with their reported loads.
            silent: seconds since the last report, of those for whom that is too long.
        """
        found: dict[WorkerId, Verdict] = {}
        clusters: set[str] = set()
        for number, (info, load) in enumerate(workers):
            if is_turn_over(number):
                yield
            record = self._record(info)
            record.take(load, now)
            record.silent_s = silent.get(info.worker_id, 0.0)
            if record.is_fine_with(load):
                found[info.worker_id] = record.verdict = FINE
            else:
                clusters.add(info.cluster)
        if len(self._records) > len(workers):
            names = {info.worker_id for info, _ in workers}
            self._records = {name: each for name, each in self._records.items() if name in names}
        for cluster in clusters:
            members = [each for each in workers if each[0].cluster == cluster]
            found |= yield from self._of_cluster(members, now)
        return found

    def _of_cluster(
        self, members: Sequence[tuple[WorkerInfo, WorkerLoad]], now: float
    ) -> Parts[dict[WorkerId, Verdict]]:
        """Judges those members of one cluster that `is_fine_with` does not clear."""
        budget = max(1, int(EJECTED_SHARE * len(members)))
        peers = yield from self._peers(members)
        able, judged = peers.able, peers.judged
        for number, (info, load, record) in enumerate(judged):
            if is_turn_over(number):
                yield
            place = (GroupKey.of(info), info.role)
            beside = peers.lateness.get(info.control_endpoint.host, [])
            crowd = min(_usual(_lateness(load), beside), MOST_CROWDED)
            elsewhere = [at for each, at in peers.damaged if each is not record]
            fault, share = self._fault(record, load, crowd, peers.slowdowns, elsewhere, now)
            record.verdict = self._judged(record, fault, share, now)
            if record.verdict.level < Health.DEGRADED:
                if record.ejected_at is not None and not load.draining:
                    able[place] += 1
                record.ejected_at = None
                continue
            if record.ejected_at is None and not load.draining:
                stays = _must_stay(info, able)
                if stays or budget <= 0:
                    why = HealthReason.LAST if stays else HealthReason.BUDGET
                    record.verdict = Verdict(Health.SUSPECT, why, fault)
                    continue
                if fault is not HealthReason.SILENT:  # its next report ends it, without a rest
                    record.ejected_at = now
                    able[place] -= 1
                    record.damaged.clear()  # faults after its pause count anew
                    record.device_errors.clear()
            budget -= 1
        return {info.worker_id: record.verdict for info, _, record in judged}

    def _peers(self, members: Sequence[tuple[WorkerInfo, WorkerLoad]]) -> Parts[_Peers]:
        """Looks at all members of one cluster."""
        peers = _Peers()
        for number, (info, load) in enumerate(members):
            if is_turn_over(number):
                yield
            record = self._record(info)
            if load.slowdown > 0:
                peers.slowdowns.append(load.slowdown)
            if (late := _lateness(load)) > 0:
                insort(peers.lateness.setdefault(info.control_endpoint.host, []), late)
            peers.damaged += [(record, at) for at in record.damaged]
            if not load.draining and record.ejected_at is None:
                peers.able[GroupKey.of(info), info.role] += 1
            if not record.is_fine_with(load):
                peers.judged.append((info, load, record))
        peers.slowdowns.sort()
        # Workers that are out already use the budget first, until their rest is over.
        peers.judged.sort(key=lambda each: each[2].ejected_at is None)
        return peers

    def _judged(self, record: _Record, fault: HealthReason, share: float, now: float) -> Verdict:
        if share >= 1.0:
            is_silent = fault is HealthReason.SILENT
            if record.back_at is not None and record.ejected_at is None and not is_silent:
                record.rest_s = min(2 * record.rest_s, MAX_REST_S)
            if not is_silent:
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
        damaged: Sequence[float],
        now: float,
    ) -> tuple[HealthReason, float]:
        """Returns the worst fault and its share of the ejection threshold; 1 ejects.

        Args:
            crowd: median lateness (`_lateness`) of its machine's other workers now.
            slowdowns: sorted slowdowns of all workers of the cluster that report one.
            damaged: when other workers of the cluster damaged sequences.
        """
        errors = len(record.device_errors) / MIN_DEVICE_ERRORS
        is_alone = record.damages_alone(damaged, now)
        shares = {
            HealthReason.HANGS: load.step_age_s / _hang_s(load, crowd),
            HealthReason.SLOW: _slowness(load.slowdown, crowd, slowdowns),
            HealthReason.LOSES: len(record.lost) / MIN_LOST,
            HealthReason.DAMAGED: 1.0 if is_alone else len(record.damaged) / MIN_DAMAGED,
            HealthReason.DEVICE: 1.0 if load.device.failing else errors,
            HealthReason.DEVICE_LOST: float(load.device.lost),
            HealthReason.REFUSES: sum(at <= now - IDLE_S for at in record.refused) / MIN_REFUSED,
            HealthReason.UNANSWERED: SUSPECT_SHARE * (record.unanswered_at is not None),
            HealthReason.SILENT: 0.0 if record.ejected_at else record.silent_s / SILENT_S,
        }
        # A fatal fault comes before one with a larger share.
        fault = max(shares, key=lambda each: (shares[each] >= 1 and each in _FATAL, shares[each]))
        return fault, shares[fault]

    def _record(self, info: WorkerInfo) -> _Record:
        record = self._records.get(info.worker_id)
        if record is None or record.incarnation != info.incarnation:
            record = self._records[info.worker_id] = _Record(info.incarnation)
        return record


def _stands_idle(load: WorkerLoad, before: WorkerLoad) -> bool:
    """Whether a worker accepts requests, holds none and computed nothing since `before`."""
    held = load.prefill_active + load.decode_running + load.decode_reserved + load.decode_preempted
    totals = (load.prefill_tokens_total, load.decode_tokens_total)
    same = totals == (before.prefill_tokens_total, before.decode_tokens_total)
    return same and not (held or load.pending_tokens or load.draining)


def _hang_s(load: WorkerLoad, crowd: float) -> float:
    if not load.step_expected_s:
        return UNKNOWN_STEP_S
    # A pause that stops all workers of a machine is not one worker's fault.
    return max(HANG_S, HANG_FACTOR * load.step_expected_s) * max(1.0, crowd / PEER_FACTOR)


def _slowness(slowdown: float, crowd: float, slowdowns: Sequence[float]) -> float:
    usual = max(_usual(slowdown, slowdowns), crowd)
    return slowdown / max(SLOW_FACTOR, PEER_FACTOR * usual)


def _usual(own: float, all_of_them: Sequence[float]) -> float:
    """Returns the median of the other values; 1 if there are none.

    Args:
        own: the worker's value; 0 where it is not known.
        all_of_them: all values, sorted; `own` is one of them unless it is 0.
    """
    others, place = len(all_of_them) - (own > 0), bisect_left(all_of_them, own)
    if others < 1:
        return 1.0
    middle = others // 2
    return all_of_them[middle + (own > 0 and middle >= place)]


def _lateness(load: WorkerLoad) -> float:
    """Returns how many times longer than usual the worker's steps take, the running one included.

    0 means that it is not known.
    """
    running = load.step_age_s / load.step_expected_s if load.step_expected_s else 0.0
    return max(load.slowdown, running)


def _must_stay(info: WorkerInfo, able: Mapping[tuple[GroupKey, Role], int]) -> bool:
    """Whether no other worker of its group could take over its role.

    Args:
        able: number of workers that are not ejected and do not drain, `info`'s among them.
    """
    group = GroupKey.of(info)
    roles = {each for each in Role if able.get((group, each), 0) > (each is info.role)}
    if Role.HYBRID in roles:
        return False
    if info.role is Role.HYBRID:
        return not {Role.PREFILL, Role.DECODE} <= roles
    return info.role not in roles


def _drop_before(times: deque[float], moment: float) -> None:
    while times and times[0] <= moment:
        times.popleft()
