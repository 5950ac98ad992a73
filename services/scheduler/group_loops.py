"""P/D-Serve's monitor over the live groups of one model: which role of which group is short.

P/D-Serve measures times at gateways. The scheduler counts requests by stage instead, which gives
the same means. Tests: tests/unit/scheduler/test_groups.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.core.details import FleetWorker
from kvmesh.core.pace import StepPace
from kvmesh.core.summary_statistics import mean
from kvmesh.core.turns import Parts
from kvmesh.core.types import Role
from kvmesh.policy.groups import GroupKey, shares_of_groups
from kvmesh.policy.pdserve import InstanceProfile, RatioStep
from kvmesh.policy.profiled_ratio import MeanLengths, measured_profile
from kvmesh.policy.ratio_monitor import RatioMonitor, StageCounts
from kvmesh.policy.waiting import Waiting, split_waiting
from services.scheduler.demand import Demand

Groups = Mapping[GroupKey, Sequence[FleetWorker]]


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
        groups = by_group(_movable(workers))
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
        self, workers: Sequence[FleetWorker], prompt_token_s: float | None = None
    ) -> Iterator[GroupStep]:
        """Yields the monitor's step for each group that had enough requests.

        Args:
            prompt_token_s: measured seconds to compute a prompt token; None while unknown.
        """
        groups = by_group(_movable(workers))
        for key in self._monitors.keys() - groups.keys():
            del self._monitors[key]
        for key, members in sorted(groups.items()):
            monitor = self._monitors.get(key)
            num_prefill = sum(each.info.role is Role.PREFILL for each in members)
            if monitor is None:
                continue
            profile = profile_of(members, prompt_token_s, monitor.lengths)
            step = monitor.end_window(num_prefill, len(members) - num_prefill, profile)
            if step is not None:
                yield GroupStep(key, members, step)

    def carried_out(self, group: GroupKey) -> None:
        """Notes that the group's last step was ordered."""
        self._monitors[group].carried_out()


def profile_of(
    members: Sequence[FleetWorker], prompt_token_s: float | None, lengths: MeanLengths | None
) -> InstanceProfile | None:
    """The measured speeds of a group's workers; None while any of them is unknown.

    Args:
        prompt_token_s: seconds to compute a prompt token.
        lengths: of the group's requests.
    """
    decoding = [each for each in members if each.info.role is not Role.PREFILL]
    paces = [each.load.room.pace for each in decoding if each.load.room.pace.of(1.0) > 0.0]
    if not paces or not prompt_token_s or lengths is None:
        return None
    pace = StepPace(mean([p.constant_s for p in paces]), mean([p.token_s for p in paces]))
    infos = [each.info for each in decoding]
    slots = mean([float(info.decode_slots) for info in infos])
    room = mean([float(info.num_blocks * info.layout.block_size) for info in infos])
    return measured_profile(prompt_token_s * lengths.uncached, pace, slots, room, lengths)


def by_group(workers: Iterable[FleetWorker]) -> dict[GroupKey, list[FleetWorker]]:
    """Workers by their group."""
    # By plain tuples first: making and hashing a key for each of thousands takes milliseconds.
    groups: dict[tuple[str, str, str, str], list[FleetWorker]] = {}
    for worker in workers:
        info = worker.info
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


def _movable(workers: Iterable[FleetWorker]) -> Iterator[FleetWorker]:
    return (each for each in workers if each.info.role is not Role.HYBRID)
