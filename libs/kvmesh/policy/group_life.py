"""Lifecycle of a P/D group: its wanted state, and the next steps towards it. Pure.

The steps depend only on the wish, on the launchers' workers, on their registrations and on the
checked connections between them, so a scheduler that restarts in any state continues where another
one stopped. A group begins to serve (its entrance opens) when all its wanted workers are ready for
the first time and have been checked, and then serves as long as it has any. Workers that cannot be
connected do not keep the others from serving. A leaving worker is closed first, and ends when
nothing runs there any more.
Source: P/D-Serve 3.2 and 3.3. Tests: tests/unit/policy/test_group_life.py.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.core.launch import Launched, LaunchSpec
from kvmesh.core.types import Role, WorkerId
from kvmesh.policy.peer_checks import CheckState

_SIDES = (Role.PREFILL, Role.DECODE, Role.HYBRID)


class GroupState(enum.Enum):
    """State of a group in its lifecycle."""

    GATHERING = "gathering"
    """Its workers start, and none serves yet."""
    CONNECTING = "connecting"
    """Its workers are there, but too few of them are connected to each other to serve."""
    READY = "ready"
    CHANGING = "changing"
    """It serves, while workers start, connect, or finish their requests before they leave."""
    UPGRADING = "upgrading"
    """Workers of two checkpoints exist: the old ones serve until all new ones are ready."""
    DRAINING = "draining"
    """It is being removed, and some of its workers still exist."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class GroupWish:
    """The wanted state of a group.

    Attributes:
        scenario: scenario that it serves; empty: any scenario without a group of its own.
        checkpoint: model folder or name for the launcher; empty: the launcher's default.
        prefill, decode, hybrid: wanted number of workers of each role.
        opened: checkpoint of the workers that serve; None: the group was never ready.
        removing: whether the group should end all its workers.
    """

    scenario: str
    checkpoint: str = ""
    prefill: int = 0
    decode: int = 0
    hybrid: int = 0
    opened: str | None = None
    removing: bool = False

    def count(self, role: Role) -> int:
        """Returns the wanted number of workers of a role."""
        if self.removing:
            return 0
        counts = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.HYBRID: self.hybrid}
        return counts.get(role, 0)

    def with_more(self, role: Role, step: int) -> GroupWish:
        """Returns the wish with more workers of a side, or fewer if the step is negative."""
        more = self.count(role) + step
        if role is Role.PREFILL:
            return dataclasses.replace(self, prefill=more)
        if role is Role.DECODE:
            return dataclasses.replace(self, decode=more)
        return dataclasses.replace(self, hybrid=more)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A worker that a launcher keeps for the group.

    Attributes:
        registered: whether it has registered, so has loaded its model.
        idle: whether no request runs there.
        peers: whether it can exchange KV with its peers in the group, once it has registered.
    """

    launched: Launched
    registered: bool = False
    idle: bool = True
    peers: CheckState = CheckState.VERIFIED

    @property
    def name(self) -> WorkerId:
        """Name of the worker."""
        return self.launched.worker_id

    @property
    def is_connected(self) -> bool:
        """Whether it is ready, and can exchange KV with its peers."""
        return self.registered and self.peers is CheckState.VERIFIED


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The next steps of a group.

    Attributes:
        state: state of the group now.
        opens: whether the entrance opens now for the wished checkpoint.
        closed: workers that get no new requests.
        start: workers to start.
        stop: leaving workers to stop, on which nothing runs any more.
    """

    state: GroupState
    opens: bool
    closed: frozenset[WorkerId]
    start: tuple[LaunchSpec, ...]
    stop: tuple[WorkerId, ...]


def is_member(launched: Launched) -> bool:
    """Whether a worker was started for the group of its scenario, of the launcher's first model.

    Spares belong to no group.
    """
    return not launched.spec.model and launched.spec.role in _SIDES


def wish_of(members: Sequence[Launched], scenario: str) -> GroupWish:
    """Returns the wish of a group that was never applied, from its initial workers."""
    mine = [each.spec for each in members if is_member(each)]
    specs = [spec for spec in mine if spec.scenario == scenario]
    roles = [spec.role for spec in specs]
    checkpoint = specs[0].checkpoint if specs else ""
    prefill, decode, hybrid = (roles.count(role) for role in _SIDES)
    opened = checkpoint if specs else None
    return GroupWish(scenario, checkpoint, prefill, decode, hybrid, opened)


def group_step(wish: GroupWish, members: Sequence[GroupMember]) -> GroupStep:
    """Returns the next steps towards a wish.

    Args:
        members: the workers of the group (`is_member`).
    """
    wished = [each for each in members if each.launched.spec.checkpoint == wish.checkpoint]
    others = [each for each in members if each.launched.spec.checkpoint != wish.checkpoint]
    start: list[LaunchSpec] = []
    stay: list[GroupMember] = []
    for role in _SIDES:
        # Connected workers are kept before others, then those with lower numbers.
        side = sorted(
            (each for each in wished if each.launched.spec.role is role),
            key=lambda each: (not each.is_connected, not each.registered, _order(each.name)),
        )
        stay += side[: wish.count(role)]
        missing = wish.count(role) - len(side)
        start += [LaunchSpec(role, wish.scenario, wish.checkpoint)] * max(missing, 0)
    is_complete = not start and all(each.registered for each in stay)
    is_open = wish.opened == wish.checkpoint
    may_open = _may_open(stay, others_serve=bool(others) and wish.opened is not None)
    opens = is_complete and not is_open and may_open
    staying = {each.name for each in stay}
    leaving = [each for each in wished if each.name not in staying]
    closed: set[WorkerId] = set()
    # Until the entrance opens, only workers of the previous checkpoint serve.
    serving = None if is_open or opens or wish.removing else wish.opened
    leaving += [each for each in others if each.launched.spec.checkpoint != serving]
    closed |= {each.name for each in leaving}
    if not (is_open or opens):
        closed |= staying
    stop = tuple(each.name for each in leaving if each.idle)
    is_whole = is_complete and all(each.is_connected for each in stay)
    serves = opens or (is_open and _can_serve(stay))
    state = _state(
        wish,
        upgrades=bool(others),
        is_open=is_open,
        lacks_peers=is_complete and not is_whole and not serves,
        is_done=is_whole and not leaving,
        leaves=bool(leaving),
    )
    return GroupStep(state, opens, frozenset(closed), tuple(start), stop)


def _can_serve(workers: Sequence[GroupMember]) -> bool:
    """Whether enough workers are connected: a prefill and a decode worker, or a hybrid one."""
    roles = {each.launched.spec.role for each in workers if each.is_connected}
    return Role.HYBRID in roles or roles >= {Role.PREFILL, Role.DECODE}


def _may_open(workers: Sequence[GroupMember], *, others_serve: bool) -> bool:
    """Whether the entrance may open, once all workers are ready.

    The first result for each is awaited. Workers that cannot be connected then stay closed, and do
    not hold up the group. While workers of another checkpoint serve, all new ones must be connected
    before they take over.
    """
    if all(each.is_connected for each in workers):
        return bool(workers)
    is_checked = all(each.peers is not CheckState.PENDING for each in workers)
    return is_checked and not others_serve and _can_serve(workers)


def _state(
    wish: GroupWish,
    *,
    upgrades: bool,
    is_open: bool,
    lacks_peers: bool,
    is_done: bool,
    leaves: bool,
) -> GroupState:
    if wish.removing:
        return GroupState.DRAINING if leaves else GroupState.GONE
    if upgrades:
        return GroupState.UPGRADING
    if lacks_peers:
        return GroupState.CONNECTING
    if not is_open:
        return GroupState.GATHERING
    return GroupState.READY if is_done else GroupState.CHANGING


def _order(name: str) -> tuple[str, int]:
    """Returns a sort key by which decode-10 comes after decode-9."""
    number = re.search(r"\d+$", name)
    return (name, 0) if number is None else (name[: number.start()], int(number.group()))
