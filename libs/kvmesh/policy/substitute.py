"""Chooses the cheapest substitute for a worker that was lost or ejected. Pure.

Costs are in seconds of one worker's work. They add up the work that the group misses until the
substitute serves, the KV that becomes useless and is recomputed, and the work that is missed where
the substitute comes from. The last worker of a role is never taken.
Source: P/D-Serve 3.4 asks for the substitution of least cost and leaves the cost open. Tests:
tests/unit/policy/test_substitute.py.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvmesh.core.details import WorkerDetail
from kvmesh.core.empty_spare import EmptySpare
from kvmesh.core.health import Health
from kvmesh.core.types import Role, WorkerId, WorkerInfo, WorkerLoad
from kvmesh.policy.groups import GroupKey

ORDER_S = 0.1
"""Seconds until a worker with the model loaded serves in another role, before that is measured."""

START_S = 30.0
"""Seconds that a new process takes to start, while no measurement is reported."""

HORIZON_S = 300.0
"""Seconds for which a lost worker counts as missing if its return is not expected."""


MAX_OF_A_SIDE = 16
"""Workers of a side that are named as substitutes, so that a choice among thousands stays short."""


class Means(enum.Enum):
    """A way to fill a place; of two with equal cost the earlier one is chosen."""

    SPARE = "a spare that has the model"
    RETURN = "its own return"
    EMPTY = "an empty spare that loads the model"
    FLIP = "a worker of the other role"
    SLACK = "a worker of another group"
    PROCESS = "a new process"


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that could take the place, or shares the work meanwhile.

    Attributes:
        load: its last report.
    """

    info: WorkerInfo
    load: WorkerLoad
    health: Health = Health.OK
    detail: WorkerDetail = WorkerDetail()

    @property
    def busy(self) -> float:
        """Fraction of its capacity in use: prefill slots, or decode slots or blocks if larger."""
        info, load = self.info, self.load
        if info.role is Role.PREFILL:
            return min(load.prefill_active / max(info.prefill_slots, 1), 1.0)
        held = load.decode_running + load.decode_reserved + load.decode_preempted
        blocks = 1.0 - load.blocks_free / max(info.num_blocks, 1)
        return min(max(held / max(info.decode_slots, 1), blocks), 1.0)

    @property
    def kv_tokens(self) -> int:
        """Number of token positions whose KV the worker holds."""
        used = self.info.num_blocks - self.load.blocks_free
        return (used + self.detail.blocks_cached) * self.info.layout.block_size


_Sides = dict[tuple[GroupKey, Role], list[Member]]
"""Workers by what they do."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a lost worker.

    Attributes:
        info: the lost worker.
        back_s: seconds until it returns after its own restart; None: it does not return.
        new_s: seconds until a new process would serve; None: no process can be started.
        load_s: seconds in which an empty spare would load the model and serve.
    """

    info: WorkerInfo
    back_s: float | None = None
    new_s: float | None = None
    load_s: float = START_S


@dataclass(frozen=True, slots=True)
class Paces:
    """Measured times.

    Attributes:
        ready_s: seconds from the order until a worker serves in its new place, by means.
        token_s: seconds to compute a prompt token; 0: not known.
    """

    ready_s: Mapping[Means, float] = field(default_factory=dict)
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Option:
    """One way to fill the place, and its cost.

    Attributes:
        worker_id: the substitute; empty for a new process, which has no name yet.
        ready_s: seconds until it serves there.
        wait_s: seconds of one worker's work that the group misses until then.
        kv_s: seconds to recompute KV that the substitute holds and cannot use there.
        taken_s: seconds of one worker's work that its former place misses.
    """

    means: Means
    worker_id: WorkerId
    ready_s: float
    wait_s: float
    kv_s: float = 0.0
    taken_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """Total cost in seconds of one worker's work."""
        return self.wait_s + self.kv_s + self.taken_s

    @property
    def reason(self) -> str:
        """The option and its cost in words, for logs."""
        parts = {"missed": self.wait_s, "KV": self.kv_s, "taken": self.taken_s}
        told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in parts.items() if seconds)
        return f"{self.means.value} costs {self.cost_s:.2f} s ({told or 'nothing is missed'})"


def substitutes(
    place: Place,
    members: Sequence[Member],
    paces: Paces,
    empties: Iterable[EmptySpare] = (),
) -> list[Option]:
    """Returns the ways to fill a place, cheapest first; empty if there is none.

    Of the workers of a side, only the cheapest `MAX_OF_A_SIDE` are among them.

    Args:
        members: all live workers; ill, draining and cordoned ones are skipped.
        empties: workers without a model.
    """
    info = place.info
    able = [each for each in members if _is_able(each, info)]
    sides = _sides(able)
    need = _need(sides.get((GroupKey.of(info), info.role), []))
    away_s = HORIZON_S if place.back_s is None else place.back_s
    order = list(Means)

    def option(means: Means, giver: Member, *, kv_tokens: int = 0, missed: float = 0.0) -> Option:
        ready_s = paces.ready_s.get(means, ORDER_S)
        return Option(
            means,
            giver.info.worker_id,
            ready_s,
            need * ready_s,
            kv_tokens * paces.token_s,
            missed * max(away_s - ready_s, 0.0),
        )

    found = [option(Means.SPARE, each) for each in able if each.info.role is Role.SPARE]
    if place.back_s is not None:
        found.append(Option(Means.RETURN, info.worker_id, away_s, need * away_s))
    found += [
        Option(Means.EMPTY, each.worker_id, place.load_s, need * place.load_s)
        for each in empties
        if each.can_be_like(info)
    ]
    if place.new_s is not None:
        found.append(Option(Means.PROCESS, WorkerId(""), place.new_s, need * place.new_s))
    # Ties go to the least busy worker, then by name, so that all schedulers agree.
    busy = {each.info.worker_id: each.busy for each in able}
    for means, side in _givers(sides, info):
        # Even an idle side loses capacity for later load when it gives a worker away.
        asked = sum(busy[each.info.worker_id] for each in side) / (len(side) - 1)
        missed = max(1 / len(side), min(asked, 1.0))
        for each, kv_tokens in _cheapest(means, side, busy):
            found.append(option(means, each, kv_tokens=kv_tokens, missed=missed))
    return sorted(
        found,
        key=lambda each: (
            each.cost_s,
            order.index(each.means),
            busy.get(each.worker_id, 0.0),
            each.worker_id,
        ),
    )


def _is_able(member: Member, lost: WorkerInfo) -> bool:
    """Whether a worker with a model is well, and could work in the lost worker's group."""
    info = member.info
    return (
        info.worker_id != lost.worker_id
        and member.health is Health.OK
        and not (member.load.draining or member.detail.cordoned)
        and info.layout == lost.layout
        and (info.model, info.cluster) == (lost.model, lost.cluster)
    )


def _sides(members: Iterable[Member]) -> _Sides:
    sides: _Sides = {}
    for each in members:
        sides.setdefault((GroupKey.of(each.info), each.info.role), []).append(each)
    return sides


def _need(left: Sequence[Member]) -> float:
    """Returns the fraction of one worker's work that a side misses with these workers left."""
    if not left:
        return 1.0
    asked = sum(each.busy for each in left) / len(left) * (len(left) + 1) / len(left)
    return max(1 / (len(left) + 1), min(asked, 1.0))


def _givers(sides: _Sides, info: WorkerInfo) -> Iterator[tuple[Means, list[Member]]]:
    """Yields the sides with at least two workers, which can give one away."""
    here = GroupKey.of(info)
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(info.role)
    for (group, role), side in sides.items():
        if len(side) < 2:
            continue
        if group != here and role is info.role:
            yield Means.SLACK, side
        elif group == here and role is other:
            yield Means.FLIP, side


def _cheapest(
    means: Means, side: Iterable[Member], busy: Mapping[WorkerId, float]
) -> list[tuple[Member, int]]:
    """Returns the workers of a side that cost least, with the KV tokens that become useless."""
    moves = means is Means.SLACK
    costs = [
        (each.kv_tokens if moves else 0, busy[each.info.worker_id], each.info.worker_id, each)
        for each in side
    ]
    return [(each, kv_tokens) for kv_tokens, _, _, each in heapq.nsmallest(MAX_OF_A_SIDE, costs)]
