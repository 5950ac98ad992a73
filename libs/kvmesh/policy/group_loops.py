"""The loops of each P/D group of one model: FlowKV's roles and P/D-Serve's monitor. The scheduler
and the simulator both use them.

P/D-Serve measures times at gateways. Here requests are counted by stage, which gives the same
means. The owner of the loops collects reports, and carries the changes out.
Tests: tests/unit/scheduler/test_groups.py, tests/unit/scheduler/test_equal_loops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.details import FleetWorker
from kvmesh.core.pace import StepPace
from kvmesh.core.summary_statistics import mean
from kvmesh.core.turns import Parts, at_once, is_turn_over
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.groups import GroupKey, shares_of_groups
from kvmesh.policy.pdserve import InstanceProfile, RatioStep
from kvmesh.policy.profiled_ratio import MeanLengths, measured_profile
from kvmesh.policy.ratio_monitor import RatioMonitor, StageCounts
from kvmesh.policy.reallocation import choose_giver
from kvmesh.policy.role_loop import RoleCycle, RoleLoop, WorkerReading
from kvmesh.policy.waiting import Demand, Waiting, per_worker, split_waiting

Groups = Mapping[GroupKey, Sequence[FleetWorker]]

PromptSeconds = Callable[[float], float]
"""Seconds to compute a prompt, by its uncached tokens."""


@dataclass(frozen=True, slots=True)
class RoleWork:
    """One cycle of one group's role loop. Nothing else uses the loop meanwhile.

    Attributes:
        share: waiting requests per worker of the side for which they wait.
    """

    group: GroupKey
    loop: RoleLoop
    members: tuple[FleetWorker, ...]
    share: Waiting

    def cycle(self, now: float) -> Parts[RoleCycle]:
        """Runs the cycle in parts."""
        readings: list[WorkerReading] = []
        for number, each in enumerate(self.members):
            if is_turn_over(number):
                yield
            readings.append(self.loop.read(each.info, each.load, self.share))
        return (yield from self.loop.cycle(readings, now))


class RoleLoops:
    """One role loop per group. A worker can only help its own group: no other group can use it."""

    def __init__(self) -> None:
        self._loops: dict[GroupKey, RoleLoop] = {}

    @property
    def is_helping(self) -> bool:
        """Whether a worker of any group helps the other side now."""
        return any(loop.is_helping for loop in self._loops.values())

    def work(self, workers: Sequence[FleetWorker], demand: Demand) -> Parts[list[RoleWork]]:
        """Returns the work of FlowKV's cycle for every group.

        Args:
            workers: all local ones.
            demand: requests that wait at the gateways.
        """
        groups = yield from _grouped(workers)
        for key in self._loops.keys() - groups.keys():
            del self._loops[key]
        waiting = waiting_by_group(groups, demand)
        yield
        return [
            RoleWork(
                key,
                self._loops.setdefault(key, RoleLoop()),
                tuple(members),
                per_worker(waiting[key], [each.info.role for each in members]),
            )
            for key, members in sorted(groups.items())
        ]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The monitor's result for one group."""

    group: GroupKey
    members: Sequence[FleetWorker]
    step: RatioStep


@dataclass(slots=True)
class _Arrived:
    """Requests of one scenario that arrived in a cycle: their number, and their tokens."""

    count: int = 0
    uncached: float = 0.0
    prompt: float = 0.0
    output: float = 0.0

    def add(self, lengths: MeanLengths) -> None:
        self.count += 1
        self.uncached += lengths.uncached
        self.prompt += lengths.prompt
        self.output += lengths.output

    @property
    def mean(self) -> MeanLengths:
        return MeanLengths(
            self.uncached / self.count, self.prompt / self.count, self.output / self.count
        )


class GroupLoops:
    """One monitor per group."""

    def __init__(self) -> None:
        self._monitors: dict[GroupKey, RatioMonitor] = {}
        self._new: dict[str, _Arrived] = {}

    def note_new(self, scenario: str, lengths: MeanLengths) -> None:
        """Notes a request that was routed for the first time."""
        self._new.setdefault(scenario, _Arrived()).add(lengths)

    def observe(
        self, workers: Sequence[FleetWorker], demand: Demand, elapsed_s: float
    ) -> Parts[None]:
        """Adds the loads of a cycle.

        Args:
            demand: requests that wait at the gateways.
        """
        groups = yield from _grouped(workers)
        yield
        new, self._new = self._new, {}
        sizes = sizes_of(groups)
        arrived = dict.fromkeys(sizes, 0.0)
        waiting = waiting_by_group(groups, demand)
        yield
        for scenario, they in new.items():
            for key, share in shares_of_groups({scenario: 1}, sizes).items():
                arrived[key] += they.count * share
                if share:
                    monitor = self._monitors.setdefault(key, RatioMonitor())
                    monitor.note_prompts(they.mean, they.count * share)
        for key, members in groups.items():
            monitor = self._monitors.setdefault(key, RatioMonitor())
            counts = StageCounts.of(waiting[key], (each.load for each in members))
            monitor.observe(counts, arrived[key], elapsed_s)
            yield

    def end_window(
        self, workers: Sequence[FleetWorker], prompt_s: PromptSeconds | None = None
    ) -> Iterator[GroupStep]:
        """Yields the monitor's step for each group that had enough requests.

        Args:
            prompt_s: measured speed of prefill; None while unknown.
        """
        groups = at_once(_grouped(workers))
        for key in self._monitors.keys() - groups.keys():
            del self._monitors[key]
        for key, members in sorted(groups.items()):
            monitor = self._monitors.get(key)
            num_prefill = sum(each.info.role is Role.PREFILL for each in members)
            if monitor is None:
                continue
            profile = profile_of(members, prompt_s, monitor.lengths)
            step = monitor.end_window(num_prefill, len(members) - num_prefill, profile)
            if step is not None:
                yield GroupStep(key, members, step)

    def carried_out(self, group: GroupKey) -> None:
        """Notes that the group's last step was ordered."""
        self._monitors[group].carried_out()


def profile_of(
    members: Sequence[FleetWorker], prompt_s: PromptSeconds | None, lengths: MeanLengths | None
) -> InstanceProfile | None:
    """The measured speeds of a group's workers; None while any of them is unknown.

    Args:
        prompt_s: speed of prefill.
        lengths: of the group's requests.
    """
    decoding = [each for each in members if each.info.role is not Role.PREFILL]
    paces = [each.load.room.pace for each in decoding if each.load.room.pace.of(1.0) > 0.0]
    if not paces or prompt_s is None or lengths is None:
        return None
    pace = StepPace(mean([p.constant_s for p in paces]), mean([p.token_s for p in paces]))
    infos = [each.info for each in decoding]
    slots = mean([float(info.decode_slots) for info in infos])
    room = mean([float(info.num_blocks * info.layout.block_size) for info in infos])
    return measured_profile(prompt_s(lengths.uncached), pace, slots, room, lengths)


def _grouped(workers: Sequence[FleetWorker]) -> Parts[dict[GroupKey, list[FleetWorker]]]:
    """Workers with one role each by their group."""
    # By plain tuples first: making and hashing a key for each of thousands takes milliseconds.
    groups: dict[tuple[str, str, str, str], list[FleetWorker]] = {}
    for number, worker in enumerate(workers):
        if is_turn_over(number):
            yield
        info = worker.info
        if info.role is Role.HYBRID:
            continue
        name = (info.model, info.layout.model_fingerprint, info.scenario, info.cluster)
        members = groups.get(name)
        if members is None:
            members = groups[name] = []
        members.append(worker)
    return {GroupKey.of(members[0].info): members for members in groups.values()}


def sizes_of(groups: Groups) -> dict[GroupKey, int]:
    """Number of workers of each group."""
    return {key: len(members) for key, members in groups.items()}


def waiting_by_group(groups: Groups, demand: Demand) -> dict[GroupKey, Waiting]:
    """Number of waiting requests of each group, by the side for which they wait."""
    sizes = sizes_of(groups)
    reserved, unreserved = dict.fromkeys(sizes, 0.0), dict.fromkeys(sizes, 0.0)
    for scenario, looking in demand.scenarios.items():
        for key, share in shares_of_groups({scenario: 1}, sizes).items():
            reserved[key] += looking.reserved * share
            unreserved[key] += looking.unreserved * share
    return {
        key: split_waiting(reserved[key], unreserved[key], [each.load for each in members])
        for key, members in groups.items()
    }


def sole_giver(to_role: Role | None, home: Sequence[FleetWorker]) -> WorkerId | None:
    """Returns the least loaded worker of the side that gives one up; None if it can spare none.

    Of several groups, none gives a worker up: lengths and queues of all groups together do not tell
    which group can spare one.

    Args:
        home: all local workers, or those of one group.
    """
    if to_role is None or len({GroupKey.of(each.info) for each in home}) > 1:
        return None
    return choose_giver([(each.info, each.load) for each in home], to_role)


def givers(to_role: Role | None, members: Sequence[FleetWorker], count: int) -> list[WorkerId]:
    """Returns the least loaded workers of a group's side that gives some up; it keeps its last."""
    left, found = list(members), list[WorkerId]()
    while len(found) < count and (name := sole_giver(to_role, left)) is not None:
        found.append(name)
        left = [each for each in left if each.info.worker_id != name]
    return found
