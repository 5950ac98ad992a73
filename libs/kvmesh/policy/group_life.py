"""The life of a P/D group: what its workers are to be, and the next steps from what they are. Pure.

Everything follows from the wish, from what launchers keep and from what has registered, so a
scheduler that is restarted in any state goes on where another one stopped. A group serves when all
that it is to have are there for the first time (its entrance opens), and from then on as long as it
has any. Whoever leaves is closed first, and ends when nothing runs there any more.
Source: P/D-Serve 3.2 and 3.3. Tests: tests/unit/policy/test_group_life.py.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.launch import Launched, LaunchSpec
from kvmesh.core.types import Role, WorkerId

_SIDES = (Role.PREFILL, Role.DECODE, Role.HYBRID)


class GroupState(enum.Enum):
    """Where a group is in its life."""

    GATHERING = "gathering"
    """Its workers start; none of them serves yet."""
    READY = "ready"
    CHANGING = "changing"
    """It serves, and workers come, or wait for what runs there before they go."""
    UPGRADING = "upgrading"
    """As one of another checkpoint it serves, until all of the new one are there."""
    DRAINING = "draining"
    """It is to go, and something still runs."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class GroupWish:
    """What a group is to be.

    Attributes:
        scenario: that it serves; empty: any that has no group of its own.
        checkpoint: as its launcher takes it; empty: that of the launcher's others.
        opened: checkpoint of those that serve; None: none has been ready yet.
        removing: it is to have no workers any more.
    """

    scenario: str
    checkpoint: str = ""
    prefill: int = 0
    decode: int = 0
    hybrid: int = 0
    opened: str | None = None
    removing: bool = False

    def count(self, role: Role) -> int:
        """How many of a role it is to have."""
        if self.removing:
            return 0
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.HYBRID: self.hybrid}
        return counts.get(role, 0)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A worker that a launcher keeps for the group.

    Attributes:
        registered: it has loaded its model.
        idle: nothing runs there.
    """

    launched: Launched
    registered: bool = False
    idle: bool = True

    @property
    def name(self) -> WorkerId:
        """Of the worker."""
        return self.launched.worker_id


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What is to be done now.

    Attributes:
        opens: the entrance opens for the wished checkpoint.
        closed: who gets nothing new.
        start: workers to start.
        stop: workers on which nothing runs any more.
    """

    state: GroupState
    opens: bool
    closed: frozenset[WorkerId]
    start: tuple[LaunchSpec, ...]
    stop: tuple[WorkerId, ...]


def is_member(launched: Launched, scenario: str) -> bool:
    """Whether a worker was started for the group of a scenario, of the launcher's first model.

    Spares are nobody's.
    """
    spec = launched.spec
    return (spec.scenario, spec.model) == (scenario, "") and spec.role in _SIDES


def wish_of(members: Sequence[Launched], scenario: str) -> GroupWish:
    """What a group is that nobody wished for: its workers were there from the start."""
    specs = [each.spec for each in members if is_member(each, scenario)]
    roles = [spec.role for spec in specs]
    checkpoint = specs[0].checkpoint if specs else ""
    prefill, decode, hybrid = (roles.count(role) for role in _SIDES)
    opened = checkpoint if specs else None
    return GroupWish(scenario, checkpoint, prefill, decode, hybrid, opened)


def group_step(wish: GroupWish, members: Sequence[GroupMember]) -> GroupStep:
    """The next steps towards a wish.

    Args:
        members: of the group, as `is_member` says.
    """
    wished = [each for each in members if each.launched.spec.checkpoint == wish.checkpoint]
    others = [each for each in members if each.launched.spec.checkpoint != wish.checkpoint]
    start: list[LaunchSpec] = []
    stay: list[GroupMember] = []
    for role in _SIDES:
        # Who is there is kept before who is not; else those who came first.
        side = sorted(
            (each for each in wished if each.launched.spec.role is role),
            key=lambda each: (not each.registered, _order(each.name)),
        )
        stay += side[: wish.count(role)]
        missing = wish.count(role) - len(side)
        start += [LaunchSpec(role, wish.scenario, wish.checkpoint)] * max(missing, 0)
    is_complete = not start and all(each.registered for each in stay)
    is_open = wish.opened == wish.checkpoint
    opens = is_complete and not is_open and bool(stay)
    staying = {each.name for each in stay}
    leaving = [each for each in wished if each.name not in staying]
    closed: set[WorkerId] = set()
    # Until the entrance opens, those of the checkpoint before serve, and nobody else.
    serving = None if is_open or opens or wish.removing else wish.opened
    leaving += [each for each in others if each.launched.spec.checkpoint != serving]
    closed |= {each.name for each in leaving}
    if not (is_open or opens):
        closed |= staying
    stop = tuple(each.name for each in leaving if each.idle)
    state = _state(wish, others, is_complete=is_complete, is_open=is_open, leaves=bool(leaving))
    return GroupStep(state, opens, frozenset(closed), tuple(start), stop)


def _state(
    wish: GroupWish,
    others: Sequence[GroupMember],
    *,
    is_complete: bool,
    is_open: bool,
    leaves: bool,
) -> GroupState:
    if wish.removing:
        return GroupState.DRAINING if leaves else GroupState.GONE
    if not is_open:
        return GroupState.UPGRADING if others else GroupState.GATHERING
    if others:
        return GroupState.UPGRADING
    return GroupState.READY if is_complete and not leaves else GroupState.CHANGING


def _order(name: str) -> tuple[str, int]:
    """decode-10 comes after decode-9."""
    number = re.search(r"\d+$", name)
    return (name, 0) if number is None else (name[: number.start()], int(number.group()))
